"""What travels where clients agree on public samples: a round's rows, and scores of them.

`Q` is the number of samples that a round asks for, `R` that of the round before.
"""

from __future__ import annotations

from fedhet.algorithms.distillation import Scores
from fedhet.wire.contract import Contract, TensorField


def instructions(scores: Scores) -> Contract:
    """Return the contract of the instructions of a method whose clients send such scores."""
    return Contract(
        (
            TensorField(
                scores,
                "float32",
                ("R", "C"),
                "the consensus of the round before",
                required=False,
                distribution=scores == "probabilities",
                needs=("rows",),
            ),
            TensorField(
                "rows",
                "uint",
                ("R",),
                "the public samples of the consensus",
                required=False,
                ids="N",
                needs=(scores,),
            ),
            TensorField("asked", "uint", ("Q",), "the public samples to predict", ids="N"),
        )
    )


def answers(scores: Scores) -> Contract:
    """Return the contract of the replies of such clients."""
    return Contract(
        (
            TensorField(
                scores,
                "float32",
                ("Q", "C"),
                "of the samples asked for",
                distribution=scores == "probabilities",
            ),
        )
    )
