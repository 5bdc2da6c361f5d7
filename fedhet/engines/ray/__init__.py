"""Runs on Ray: a cluster of the run's own on this machine, or an existing cluster that it joins."""
