"""Data: the sources of datasets, the store of a run's data, and a site's own data folder."""
