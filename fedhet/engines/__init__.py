"""Execution backends, with which clients train in this process or on Ray workers."""
