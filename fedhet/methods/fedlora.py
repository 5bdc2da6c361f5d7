"""Declaration of FedLoRA: settings and messages."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fedhet.algorithms import LORA_A, LORA_B, Aggregation
from fedhet.base.arrays import Arrays, Shapes
from fedhet.base.errors import KnowledgeError
from fedhet.methods.fedavg import FedAvgSettings, part_sizes
from fedhet.methods.spec import AVERAGED_MODEL, DP_SGD, MethodSpec, Sums
from fedhet.settings.defense import CHOOSING
from fedhet.settings.schema import NonNegative
from fedhet.wire.contract import (
    DIGEST_BITS,
    MAX_MAGNITUDE,
    Contract,
    ScalarField,
    Sizes,
    WeightsField,
)
from fedhet.wire.identity import ClientInfo

MERGING: tuple[Aggregation, ...] = ("flora", "fedex")
"""Rules that change the frozen weights. The clients of these rules keep all merged factors."""


class FedLoraSettings(FedAvgSettings):
    """Settings of FedLoRA."""

    aggregation: Literal["auto", Aggregation] = Field(
        "auto",
        description="aggregation of adapters: mean of zero-padded factors (average), mean of "
        "zero-padded factors weighted by the norms of updates (sparsity), SVD of averaged products "
        "(svd), SVD of products averaged per rank level (rank-partition), mean of B with a "
        "constant A (freeze-a), stack of all factors, merged into the frozen weights (flora), or "
        "mean of zero-padded factors, with its error merged into the frozen weights (fedex); auto "
        "= svd, or freeze-a in private runs",
    )
    prune: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="fraction of the rank levels that is always kept; the last levels are removed "
        "if training has reduced their norm; 0 = constant ranks",
    )
    prune_weight: NonNegative = Field(
        0.001,
        description="with prune: weight of the loss term that reduces the norm of the last levels",
    )

    def rule(self, *, is_private: bool) -> Aggregation:
        """Return the aggregation rule, given whether the run uses differential privacy."""
        if self.aggregation == "auto":
            return "freeze-a" if is_private else "svd"
        return self.aggregation


@dataclass(frozen=True)
class AdapterField(WeightsField):
    """Message field with a head and adapters. The adapters' rank may be below the model's rank."""

    nested: bool = True

    def describe(self) -> str:
        """Return a short description of the field's type."""
        return "weights; all adapters have the model's rank or the same smaller rank"

    def expected(self, sender: str, received: Arrays, shapes: Shapes) -> Shapes:
        """Return the expected shapes and dtypes, given the rank of the first received adapter.

        Raises KnowledgeError if a product of factors might exceed MAX_MAGNITUDE.
        """
        rank, largest = received_rank(received), rank_in(shapes)
        if not 0 < rank < largest:
            rank = largest
        expected = with_rank(shapes, rank)
        for name in (name for name in received if name.endswith(LORA_A)):
            factors = (received[name], received.get(name.removesuffix(LORA_A) + LORA_B))
            bound = float(rank)
            for factor in factors:
                bound *= float(np.abs(factor).max(initial=0.0)) if factor is not None else 1.0
            if bound > MAX_MAGNITUDE:
                fault = f"magnitude bound of the product must be at most {MAX_MAGNITUDE:g}"
                raise KnowledgeError(sender, f"{self.name}/{name}", f"{fault}, got {bound:.3g}")
        return expected


def received_rank(weights: Arrays) -> int:
    """Return the rank of the first factor B among the tensors, or 0 if there are no factors."""
    factors = (weights[name] for name in weights if name.endswith(LORA_B))
    return next((each.shape[1] for each in factors if each.ndim == 2), 0)


def rank_in(shapes: Shapes) -> int:
    """Return the rank of a model's adapters, or 0 if it has no adapters."""
    return next((shape[1] for name, (shape, _) in shapes.items() if name.endswith(LORA_B)), 0)


def with_rank(shapes: Shapes, rank: int) -> Shapes:
    """Return the shapes of a model's tensors, with adapters of rank `rank`."""
    found = dict(shapes)
    for name, (shape, dtype) in shapes.items():
        if name.endswith(LORA_A):
            found[name] = (rank, shape[1]), dtype
        elif name.endswith(LORA_B):
            found[name] = (shape[0], rank), dtype
    return found


def merged_digest(factors: Arrays) -> int:
    """Return a digest of merged factors, or 0 if their rank is 0."""
    from fedhet.wire.knowledge import digest_of  # Imports PyTorch.

    return digest_of(factors) if received_rank(factors) else 0


def lora_sizes(settings: FedLoraSettings, client: ClientInfo) -> Sizes:
    """Return the axis sizes, the tensor shapes of the model, and the largest merged factors.

    The rank of merged factors is at most twice the largest rank of a change of a frozen weight.
    """
    sizes = part_sizes(settings, client)
    if settings.aggregation not in MERGING:
        return replace(sizes, unused=(*sizes.unused, "merged", "start", "base"))
    weights = sizes.models["weights"]
    adapters = {name: each for name, each in weights.items() if name.endswith((LORA_A, LORA_B))}
    ranks = [
        min(shape[0], adapters[name.removesuffix(LORA_B) + LORA_A][0][1])
        for name, (shape, _) in adapters.items()
        if name.endswith(LORA_B)
    ]
    merged = with_rank(adapters, 2 * max(ranks, default=0))
    return replace(sizes, models={"weights": weights, "merged": merged})


def sent_sizes(
    settings: FedLoraSettings, client: ClientInfo, rule: Aggregation, *, reply: bool = False
) -> Sizes:
    """Return the axis sizes and the shapes of the tensors sent with an aggregation rule.

    With `flora`, only replies contain adapters, because clients draw new adapters in each round.
    """
    sizes, unsent = lora_sizes(settings, client), tuple[str, ...]()
    if rule == "freeze-a":
        unsent = (LORA_A,)
    elif rule == "flora" and not reply:
        unsent = (LORA_A, LORA_B)
    sent = {n: each for n, each in sizes.models["weights"].items() if not n.endswith(unsent)}
    # Language models have no head, so that the instructions of `flora` contain no weights.
    unused = sizes.unused if sent else (*sizes.unused, "weights")
    return replace(sizes, models={**sizes.models, "weights": sent}, unused=unused)


SPEC = MethodSpec(
    title="LoRA adapters with different ranks",
    paper="Bai et al., Federated Fine-tuning of Large Language Models under Heterogeneous Tasks",
    headline="common",
    deployed=AVERAGED_MODEL,
    paper_model="the averaged adapters, reduced to the rank of the client",
    needs_task="loss",
    late="kept",
    settings=FedLoraSettings,
    sizes=lora_sizes,
    kinds=("private", "global"),
    client_model="model",
    defenses=CHOOSING,
    metrics={"top_energy": "fraction of the adapters' energy within the smallest rank"},
    instructions=Contract(
        (
            AdapterField("weights", "averaged adapters with the client's rank"),
            AdapterField(
                "merged", "factors merged into the frozen weights that the client lacks", False
            ),
            ScalarField("start", int, "rank of the merged factors that the client keeps", low=0),
            ScalarField(
                "base",
                int,
                "digest of the merged factors that the client keeps",
                low=0,
                high=2**DIGEST_BITS,
            ),
        )
    ),
    replies=Contract(
        (
            AdapterField("weights", "adapters and head after training"),
            ScalarField(
                "base", int, "digest of the client's merged factors", low=0, high=2**DIGEST_BITS
            ),
        )
    ),
    privacy=DP_SGD,
    sums=Sums(unsupported="the server multiplies the adapters of each client"),
)
