"""Execution backends: training of clients in this process or on Ray workers."""
