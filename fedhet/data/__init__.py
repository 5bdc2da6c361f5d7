"""Data: datasets by name, their partition among clients, and a site's own data folder."""

from fedhet.data.datasets import common_test, dataset_names, is_table, kind, load
from fedhet.data.hub import KIND as HUB
from fedhet.data.labelled import joined, labelled_parts, pooled_parts, split_labels
from fedhet.data.partition import client_name, label_counts, label_space, partition
from fedhet.data.public import GENERATED, MADE_HERE, UNUSED, public_set, refuse_overlap
from fedhet.data.site import ClientData, client_data, site_data, validate
from fedhet.data.spec import UNKNOWN, Dataset, DataSpec, Split
from fedhet.data.user_dataset import KIND as OWN

__all__ = [
    "GENERATED", "HUB", "MADE_HERE", "OWN", "UNKNOWN", "UNUSED", "ClientData", "DataSpec",
    "Dataset", "Split", "client_data", "client_name", "common_test", "dataset_names", "is_table",
    "joined", "kind", "label_counts", "label_space", "labelled_parts", "load", "partition",
    "pooled_parts", "public_set", "refuse_overlap", "site_data", "split_labels",
    "validate",
]  # fmt: skip
