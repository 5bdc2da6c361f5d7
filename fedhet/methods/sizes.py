"""What a declaration says of models.

It needs the models, and so PyTorch, which is imported when it is asked for.
"""

from __future__ import annotations

from fedhet.algorithms.choices import Part
from fedhet.base.arrays import Shapes
from fedhet.kinds import Shape
from fedhet.settings.run import RunSettings


def model_shapes(
    model: str, shape: Shape, classes: int, *, part: Part = "all", feature_dim: int | None = None
) -> Shapes:
    """Return the shape and dtype of each tensor of a model, or of a part of it.

    `shape` is that of one sample. `feature_dim` is the width of the features before the head;
    None: the model's own.
    """
    from fedhet.models.parts import shapes_of

    return shapes_of(part, model, shape, classes, feature_dim)


def has_dropout(model: str, shape: Shape, classes: int) -> bool:
    """Return whether a model has any dropout layer."""
    from fedhet import models
    from fedhet.algorithms import uncertainty

    return uncertainty.has_dropout(models.build(model, shape, classes, seed=0))


def first_model(run: RunSettings) -> str:
    """Return the name of the first client's model."""
    from fedhet.models import assign

    return assign(run.models.pool, run.clients, run.seed, run.models.assignment)[0]
