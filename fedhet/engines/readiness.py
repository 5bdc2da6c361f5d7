"""Refuses a run whose files or models cannot be used, before anything is started or trained."""

from __future__ import annotations

import logging
from typing import Any

import torch

from fedhet.base.errors import ModelError
from fedhet.client_runtime.node import read_node
from fedhet.client_runtime.samples import ClientSamples
from fedhet.config.resolve import Config, check
from fedhet.data.sources import paths_of
from fedhet.data.spec import Split
from fedhet.data.store import RunData
from fedhet.models import is_user_model
from fedhet.models.pretrained import check_weights, is_pretrained
from fedhet.wire.identity import ClientInfo

LOG = logging.getLogger("fedhet")


def check_files(config: Config, data: RunData) -> None:
    """Raise FedhetError if the dataset or pretrained weights are not on this machine."""
    for name in filter(is_pretrained, config.run.models.pool):
        check_weights(name)
    if not all(path.exists() for path in paths_of(config.run.data)):
        check(config, data)  # says what is missing, or downloads it


def check_own_models(config: Config, data: RunData) -> None:
    """Set up a client without samples for each model of one's own. Raises ModelError.

    A method may need more of a model than a forward pass, such as another feature width.
    """
    for name in filter(is_user_model, dict.fromkeys(config.run.models.pool)):
        try:
            _client(config, data, name).setup()
        except ModelError:
            raise
        except Exception as error:  # of the method: the first round says where it arose
            LOG.debug("set-up of %s: %s", name, error)


def _client(config: Config, data: RunData, model: str) -> Any:
    """Return the first client, with that model and without samples."""
    place = {"partition-id": 0, "num-partitions": config.run.clients, "device": "cpu"}
    node = read_node({**place, "model": model}, config.run, data=data)
    shape, classes = tuple(data.dataset.shape), len(data.dataset.classes)
    nothing = Split(torch.zeros(0, *shape), torch.zeros(0, dtype=torch.int64))
    info = ClientInfo(node.name, model, 0, classes, data.dataset.kind, shape)
    samples = ClientSamples(info, nothing, nothing, {}, torch.arange(classes), 0)
    return config.method.client(config, node, samples=samples)
