"""Deployments over gRPC: keys, access to a server, and local deployments."""
