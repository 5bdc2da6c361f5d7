"""Declaration of CoFED: settings and messages."""

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from fedhet.methods.spec import PUBLIC_PREDICTIONS, MethodSpec, Passes, Sums
from fedhet.settings.run import Optimizer, TrainingSettings
from fedhet.settings.schema import Count, CountOrNone, Distinct, Frozen, Listed, MethodSettings
from fedhet.wire.contract import Contract, ScalarField, TensorField, all_or_none
from fedhet.wire.identity import is_name

MAX_WEIGHT = 1e6


def _by_client(weights: dict[str, float]) -> Frozen:
    if not all(map(is_name, weights)):
        raise ValueError("expected client names as keys")
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
        0.3,
        description="fraction of votes above which a class becomes a pseudolabel (alpha, Eq. 18)",
    )
    credibility: Literal["equal", "samples"] | Weights = Field(
        "equal",
        description="voting weights: equal, by number of training samples, or a table {site-a = 2}",
    )
    iterations: Count = Field(
        1,
        description="iterations of prediction, voting, and update training; rounds = "
        "iterations + 1",
    )
    margin: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="maximum difference between a participant's two highest probabilities at which "
        "it abstains; 0 = never abstain",
    )
    update_epochs: CountOrNone = Field(
        0, description="epochs of update training for networks; 0 = training.local-epochs"
    )
    update_batch_size: CountOrNone = Field(
        0, description="batch size of update training; 0 = training.batch-size"
    )
    search: Literal["none", "grid"] = Field(
        "none",
        description="each participant's hyperparameter search on held-out data, with the values of "
        "the following settings (Section 5.2)",
    )
    search_optimizers: Optimizers = Field(
        ("adam", "sgd"), description="optimizers to try with search = grid"
    )
    search_rates: Factors = Field(
        (0.002, 0.004, 0.006, 0.008, 0.01),
        description="learning rates to try with search = grid; multiplied by 10 for sgd",
    )
    search_decays: Decays = Field(
        (1.0, 0.99),
        description="learning-rate decay factors per epoch to try with search = grid",
    )
    search_updates: Factors = Field(
        (0.1, 2.0),
        description="ratios to try with search = grid: learning rate of update training, divided "
        "by that of local training",
    )
    search_share: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.2, description="fraction of the training data held out with search = grid"
    )

    def fixed_rounds(self) -> int:
        """Return the number of rounds: one round of local training, and one round per iteration."""
        return self.iterations + 1


def _passes(own: CofedSettings, training: TrainingSettings, rounds: int) -> tuple[Passes, ...]:
    """Return the numbers of passes over the samples, in local and in update training."""
    epochs = own.update_epochs or training.local_epochs
    return (
        Passes(1, training.batch_size, training.local_epochs),
        Passes(rounds - 1, own.update_batch_size or training.batch_size, epochs),
    )


SPEC = MethodSpec(
    title="clients' vote on pseudolabels for public data; any models and label spaces",
    paper="Cao et al., Cross-Silo Heterogeneous Model Federated Multitask Learning (CoFED)",
    headline="common",
    paper_model="each participant's model, relative to its model before the update training",
    only_tasks="its clients vote on classes",
    settings=CofedSettings,
    kinds=("private", "local"),
    needs_public=True,
    any_model="loss",
    robustness="the method averages no replies, and votes have a threshold ('cofed.threshold')",
    instructions=Contract(
        (
            ScalarField("predict", bool, "whether to predict the public set after training"),
            TensorField(
                "labels",
                "uint",
                ("N",),
                "pseudolabel of each public instance in R_i; C = none",
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
                "predicted class of each public instance; C = abstention (with cofed.margin)",
                numbers="L",
            ),
            TensorField("space", "uint", ("P",), "classes that the model distinguishes", ids="C"),
        )
    ),
    metrics={
        "pseudolabels": "total number of pseudolabels",
        "received": "pseudolabels per client",
        "conflicts": "samples with several pseudolabels, averaged over clients",
        "abstained": "fraction of abstentions",
    },
    privacy=replace(
        PUBLIC_PREDICTIONS,
        passes=_passes,
        needs={"search": ("none",)},
        reason="the search selects by scores on the client's samples",
    ),
    sums=Sums(unsupported="the server counts the votes of each client"),
)
