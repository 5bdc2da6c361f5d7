"""Data: datasets by name, the store of a run's data, and a site's own data folder.

Each name is imported when it is first used: `fedhet schema` reads a table without PyTorch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedhet.data.datasets import load
    from fedhet.data.labelled import labelled_parts, split_labels, stacked
    from fedhet.data.public import GENERATED, MADE_HERE, UNUSED, refuse_overlap
    from fedhet.data.site import Declaration, site_data
    from fedhet.data.sources import dataset_names, find_source, sample_kind
    from fedhet.data.spec import UNKNOWN, ClientData, Dataset, DataSpec, Split
    from fedhet.data.store import RunData

_HOMES = {
    "datasets": ("load",),
    "labelled": ("labelled_parts", "split_labels", "stacked"),
    "public": ("GENERATED", "MADE_HERE", "UNUSED", "refuse_overlap"),
    "site": ("Declaration", "site_data"),
    "sources": ("dataset_names", "find_source", "sample_kind"),
    "spec": ("UNKNOWN", "ClientData", "DataSpec", "Dataset", "Split"),
    "store": ("RunData",),
}
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


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
