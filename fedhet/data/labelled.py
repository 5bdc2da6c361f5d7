"""Splits a client's training samples into a labelled and an unlabelled part."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fedhet.base.errors import DataError
from fedhet.base.seeding import numpy_rng
from fedhet.data.spec import ClientData, Split, concatenated
from fedhet.settings.data import DataSettings


def labelled_parts(
    data: ClientData, table: DataSettings, seed: int, client: str
) -> tuple[Split, Split]:
    """Return the labelled and the unlabelled part of a client's training samples.

    A site with unlabelled samples of its own already has both parts, whatever the settings; for
    other clients, `split_labels` hides labels.
    """
    if data.unlabelled is not None:
        return data.train, data.unlabelled
    return split_labels(data.train, table.labelled_alpha, table.labelled_least, seed, client)


def split_labels(
    train: Split, alpha: float, least: int, seed: int, client: str
) -> tuple[Split, Split]:
    """Return the labelled and the unlabelled part of a client's training samples.

    The labelled share is drawn from Dir_2(`alpha`) by seed and client (UM-pFSSL, section VI-A),
    with at least `least` samples in each part; the samples are drawn too. With `alpha` 0, all are
    labelled. The unlabelled part keeps its labels for measurements only, never for training. Raises
    DataError for a client with too few samples.
    """
    if alpha == 0:
        return train, train.take(np.arange(0))
    if len(train) < 2 * least:
        raise DataError(
            f"{client}: has {len(train)} training samples, at least {2 * least} are needed "
            f"with 'data.labelled-alpha' = {alpha} and 'data.labelled-least' = {least}"
        )
    rng = numpy_rng(seed, "labelled", client)
    share = rng.dirichlet([alpha, alpha])[0]
    count = min(max(round(share * len(train)), least), len(train) - least)
    order = rng.permutation(len(train))
    return train.take(np.sort(order[:count])), train.take(np.sort(order[count:]))


def stacked(parts: Sequence[Split]) -> Split:
    """Return the samples of several splits, one after the other."""
    return Split(concatenated(*(part.x for part in parts)), torch.cat([part.y for part in parts]))
