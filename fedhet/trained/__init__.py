"""The use of what was trained: a client's models, their predictions, and files for elsewhere."""

from fedhet.trained.client import Predictions, TrainedClient, open_client
from fedhet.trained.export import FORMATS, export
from fedhet.trained.folders import clients_in
from fedhet.trained.inputs import read_inputs, samples_for

__all__ = [
    "FORMATS", "Predictions", "TrainedClient", "clients_in", "export", "open_client",
    "read_inputs", "samples_for",
]  # fmt: skip
