"""Runs on Ray: a Ray of a run's own or a cluster that is joined, their machines and workers."""
