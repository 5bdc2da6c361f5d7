"""Execution backends: clients train in this process, or on Ray workers."""
