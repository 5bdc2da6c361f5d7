"""A run on the machines of a Ray cluster: joining it, asking its machines, and its workers."""
