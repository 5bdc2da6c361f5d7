"""Execution backends, which train clients in this process or on Ray workers."""
