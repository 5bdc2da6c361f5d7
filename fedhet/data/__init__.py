"""Data: sources of datasets, partitions among clients, data of a run, and data of a site."""
