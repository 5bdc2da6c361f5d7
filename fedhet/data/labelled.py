"""Splits a client's training samples into a labelled and an unlabelled part."""

from __future__ import annotations

import numpy as np

from fedhet.data.site import ClientData
from fedhet.data.spec import Split
from fedhet.errors import DataError
from fedhet.seeding import numpy_rng

LEAST = 2
"""Minimum size of a client's labelled and unlabelled parts: batch norm needs two samples."""


def labelled_parts(data: ClientData, alpha: float, seed: int, client: str) -> tuple[Split, Split]:
    """Return the labelled and the unlabelled part of a client's training samples.

    A site with unlabelled samples of its own already has both parts, whatever `alpha`; for other
    clients, `split_labels` hides labels.
    """
    if data.unlabelled is not None:
        return data.train, data.unlabelled
    return split_labels(data.train, alpha, seed, client)


def split_labels(train: Split, alpha: float, seed: int, client: str) -> tuple[Split, Split]:
    """Return the labelled and the unlabelled part of a client's training samples.

    The labelled share is drawn from Dir_2(`alpha`) by seed and client (UM-pFSSL, section VI-A),
    with at least `LEAST` samples in each part; the samples are drawn too. With `alpha` 0, all are
    labelled. The unlabelled part keeps its labels for measurements only, never for training. Raises
    DataError for a client with too few samples.
    """
    if alpha == 0:
        return train, train.take(np.arange(0))
    if len(train) < 2 * LEAST:
        raise DataError(
            f"{client}: has {len(train)} training samples, at least {2 * LEAST} are needed "
            f"with 'data.labelled-alpha' = {alpha}"
        )
    rng = numpy_rng(seed, "labelled", client)
    share = rng.dirichlet([alpha, alpha])[0]
    count = min(max(round(share * len(train)), LEAST), len(train) - LEAST)
    order = rng.permutation(len(train))
    return train.take(np.sort(order[:count])), train.take(np.sort(order[count:]))
