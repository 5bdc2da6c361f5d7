"""Deployments: keys and certificates, access to a server, and local deployments."""
