"""Data: datasets by name, the store of a run's data, and a site's own data folder."""

from fedhet.data.datasets import load
from fedhet.data.labelled import labelled_parts, split_labels, stacked
from fedhet.data.public import GENERATED, MADE_HERE, UNUSED, refuse_overlap
from fedhet.data.site import Declaration, site_data
from fedhet.data.sources import dataset_names, find_source, sample_kind
from fedhet.data.spec import UNKNOWN, ClientData, Dataset, DataSpec, Split
from fedhet.data.store import RunData

__all__ = [
    "GENERATED",
    "MADE_HERE",
    "UNKNOWN",
    "UNUSED",
    "ClientData",
    "DataSpec",
    "Dataset",
    "Declaration",
    "RunData",
    "Split",
    "dataset_names",
    "find_source",
    "labelled_parts",
    "load",
    "refuse_overlap",
    "sample_kind",
    "site_data",
    "split_labels",
    "stacked",
]  # fmt: skip
