"""Data: datasets by name, the store of a run's data, and a site's own data folder."""

from fedhet.data.datasets import dataset_names, is_table, load, sample_kind
from fedhet.data.hub import KIND as HUB
from fedhet.data.labelled import joined, labelled_parts, split_labels
from fedhet.data.partition import client_name
from fedhet.data.public import GENERATED, MADE_HERE, UNUSED, refuse_overlap
from fedhet.data.site import site_data
from fedhet.data.spec import UNKNOWN, ClientData, Dataset, DataSpec, Split
from fedhet.data.store import RunData
from fedhet.data.user_dataset import KIND as OWN

__all__ = [
    "GENERATED", "HUB", "MADE_HERE", "OWN", "UNKNOWN", "UNUSED", "ClientData", "DataSpec",
    "Dataset", "RunData", "Split", "client_name", "dataset_names", "is_table", "joined",
    "labelled_parts", "load", "refuse_overlap", "sample_kind", "site_data", "split_labels",
]  # fmt: skip
