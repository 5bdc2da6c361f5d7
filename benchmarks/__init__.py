"""Benchmarks that report ratios measured within one run. `make bench` runs them."""
