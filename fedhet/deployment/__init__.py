"""Deployment over gRPC: keys, Flower's command line, and a whole deployment on this machine."""
