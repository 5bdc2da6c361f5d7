"""CoFED: its settings, and the messages between its halves."""

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from fedhet.methods.spec import PUBLIC_PREDICTIONS, MethodSpec, Passes
from fedhet.settings.run import Optimizer, TrainingSettings
from fedhet.settings.schema import Count, CountOrNone, Distinct, Frozen, Listed, MethodSettings
from fedhet.wire.contract import Contract, ScalarField, TensorField, all_or_none
from fedhet.wire.identity import is_name

MAX_WEIGHT = 1e6


def _by_client(weights: dict[str, float]) -> Frozen:
    if not all(map(is_name, weights)):
        raise ValueError("not names of clients")
    return Frozen(weights)


Weights = Annotated[
    dict[str, Annotated[float, Field(ge=0, le=MAX_WEIGHT)]], AfterValidator(_by_client)
]
Optimizers = Annotated[tuple[Optimizer, ...], Listed, Distinct]
Factors = Annotated[tuple[Annotated[float, Field(gt=0, le=1e3)], ...], Listed, Distinct]
Decays = Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], Listed, Distinct]


class CofedSettings(MethodSettings):
    """Settings of CoFED."""

    threshold: Annotated[float, Field(ge=0, le=1)] = Field(
        0.3, description="alpha of Eq. 18: share of the votes above which an instance joins a class"
    )
    credibility: Literal["equal", "samples"] | Weights = Field(
        "equal",
        description="a participant's weight in the vote: equal (1), samples (its training samples) "
        "or given by name, such as {site-a = 2}; 1 for those that are not named",
    )
    iterations: Count = Field(
        1,
        description="iterations of predicting, voting and update training; rounds = iterations + 1",
    )
    margin: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="a participant abstains where the probabilities of its two best classes differ "
        "by at most this; 0 = it never does, as in the paper's text",
    )
    update_epochs: CountOrNone = Field(
        0, description="epochs of a network's update training; 0 = local-epochs"
    )
    update_batch_size: Count = Field(
        100,
        description="samples per minibatch of update training; the presets of the paper's "
        "experiments, with 50,000 public images, have 1,000",
    )
    search: Literal["none", "grid"] = Field(
        "none",
        description="grid: each participant with a network tries the combinations below on a held-"
        "out part of its own data, and trains with the best (Section 5.2)",
    )
    search_optimizers: Optimizers = Field(
        ("adam", "sgd"), description="search = grid: optimizers to try"
    )
    search_rates: Factors = Field(
        (0.002, 0.004, 0.006, 0.008, 0.01),
        description="search = grid: learning rates to try; sgd tries ten times each",
    )
    search_decays: Decays = Field(
        (1.0, 0.99),
        description="search = grid: factors to try, by which the rate falls after each epoch",
    )
    search_updates: Factors = Field(
        (0.1, 2.0),
        description="search = grid: factors on the rate found, to try in update training",
    )
    search_share: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.2, description="search = grid: share of a participant's own training data held out"
    )

    def fixed_rounds(self) -> int:
        """Return one round of local training plus one of update training per iteration."""
        return self.iterations + 1


def _passes(own: CofedSettings, training: TrainingSettings, rounds: int) -> tuple[Passes, ...]:
    """Return local training, and then update trainings, which have batches of their own."""
    updates = own.update_epochs or training.local_epochs
    return (
        Passes(1, training.batch_size, training.local_epochs),
        Passes(rounds - 1, own.update_batch_size, updates),
    )


SPEC = MethodSpec(
    title="pseudolabels on public data by vote; any models and label spaces",
    paper="Cao et al., Cross-Silo Heterogeneous Model Federated Multitask Learning (CoFED)",
    headline="common",
    settings=CofedSettings,
    kinds=("private", "local"),
    needs_public=True,
    any_model=True,
    robustness="it averages nothing, and its votes need the share 'cofed.threshold' of the clients",
    instructions=Contract(
        (
            ScalarField("predict", bool, "is the public set to be predicted after training?"),
            TensorField(
                "labels",
                "uint",
                ("N",),
                "each public instance's pseudolabel in R_i, C for none",
                required=False,
                numbers="L",
            ),
        )
    ),
    replies=Contract(
        all_or_none(
            TensorField(
                "predictions",
                "uint",
                ("N",),
                "each public instance's class, in the smallest type; with cofed.margin, C for none",
                numbers="L",
            ),
            TensorField(
                "space", "uint", ("P",), "the classes that the model distinguishes", ids="C"
            ),
        )
    ),
    metrics={
        "pseudolabels": "pseudolabels in total",
        "received": "pseudolabels per client",
        "conflicts": "samples with several pseudolabels, per client",
        "abstained": "share of abstentions",
    },
    privacy=replace(
        PUBLIC_PREDICTIONS,
        passes=_passes,
        needs={"search": ("none",)},
        reason="a search compares scores on the client's samples",
    ),
)
