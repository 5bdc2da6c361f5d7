"""The use of what was trained: a client's models, their predictions, and files for elsewhere."""

from fedhet.inference.client import Predictions, TrainedClient, clients_in, open_client
from fedhet.inference.export import FORMATS, export
from fedhet.inference.inputs import read_inputs, samples_for

__all__ = [
    "FORMATS", "Predictions", "TrainedClient", "clients_in", "export", "open_client",
    "read_inputs", "samples_for",
]  # fmt: skip
