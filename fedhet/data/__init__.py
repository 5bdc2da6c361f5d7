"""Datasets: sources, partitions among clients, the data of a run, and the data of a site."""
