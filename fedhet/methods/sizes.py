"""What a declaration says of models.

It needs the models, and so PyTorch, which is imported when it is asked for.
"""

from __future__ import annotations

from fedhet.algorithms.choices import Part
from fedhet.base.arrays import Shapes
from fedhet.kinds import Shape
from fedhet.settings.run import RunSettings
from fedhet.wire.identity import ClientInfo


def model_shapes(
    model: str,
    shape: Shape,
    classes: int,
    *,
    kind: str = "",
    part: Part = "all",
    feature_dim: int | None = None,
) -> Shapes:
    """Return the shape and dtype of each tensor of a model, or of a part of it.

    `shape` is that of one sample, and `kind` its kind; "": the one that the model takes.
    `feature_dim` is the width of the features before the head; None: the model's own.
    """
    from fedhet.models.registry import shapes_of

    return shapes_of(part, model, shape, classes, feature_dim, kind)


def has_dropout(client: ClientInfo) -> bool:
    """Return whether a client's model has any dropout layer."""
    from fedhet import models
    from fedhet.algorithms import uncertainty

    model = models.build(client.model, client.shape, client.classes, seed=0, kind=client.kind)
    return uncertainty.has_dropout(model)


def first_model(run: RunSettings) -> str:
    """Return the name of the first client's model."""
    from fedhet.models import assign

    return assign(run.models.pool, run.clients, run.seed, run.models.assignment)[0]
