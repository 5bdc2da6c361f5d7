"""UM-pFSSL: its settings, and the messages between its halves."""

from typing import Literal

from pydantic import Field

from fedhet.algorithms import Divergence, RelationKind
from fedhet.methods.spec import MethodSpec, Protection, model_shapes
from fedhet.settings.defense import CHOOSING
from fedhet.settings.schema import Count, CountOrNone, MethodSettings, refused
from fedhet.wire.contract import Contract, ScalarField, Sizes, TensorField, WeightsField
from fedhet.wire.identity import ClientInfo


class UmPfsslSettings(MethodSettings):
    """Settings of UM-pFSSL."""

    helpers: Count = Field(5, description="length of a helper list, M, the client itself included")
    replace: CountOrNone = Field(2, description="helpers that may be replaced in a round, R")
    search_rounds: CountOrNone = Field(30, description="helpers are searched while t < this, F")
    refresh: Literal["auto"] | Count = Field(
        "auto",
        description="rounds between updates of the helpers, nu; auto: 1 / fraction, a client's "
        "mean interval between rounds, as in the paper",
    )
    warm_up: CountOrNone = Field(
        20, description="epochs on labeled data alone, in a round of all clients before t = 1"
    )
    warm_up_steps: CountOrNone = Field(
        0, description="minimum optimizer steps in the warm-up, whatever the number of labels"
    )
    passes: Count = Field(8, description="dropout masks of a prediction, T")
    relation: RelationKind = Field(
        "en+ta",
        description="what the relation depends on: entropy and test accuracy, or one of them",
    )
    divergence: Divergence = Field(
        "forward",
        description="Eq. 5 as KL(pseudo-label || own), distillation, or as printed, reversed",
    )
    pseudo_labels: bool = Field(
        True, description="do clients learn from pseudo-labels? false: from labels alone"
    )

    def refresh_rounds(self, fraction: float) -> int:
        """Return nu for a run that samples the share `fraction` of its clients in each round."""
        return max(1, round(1 / fraction)) if isinstance(self.refresh, str) else self.refresh


def model_sizes(settings: UmPfsslSettings, client: ClientInfo) -> Sizes:
    """Return the axis C, and the shapes of the architecture, for one model and for several."""
    own = model_shapes(client)
    return Sizes({"C": client.classes}, {"weights": own, "models": own})


def check_dropout(settings: UmPfsslSettings, client: ClientInfo) -> None:
    """Raise SettingsError for a model without dropout, whose predictions would not vary."""
    from fedhet import models  # both import PyTorch
    from fedhet.algorithms.uncertainty import has_dropout

    model = models.build(client.model, client.shape, client.classes, seed=0, kind=client.kind)
    if not has_dropout(model):
        rule = "a model with dropout, e.g. resnet9, cnn2-dropout or mlp-dropout"
        raise refused("models.pool", client.model, rule)


SPEC = MethodSpec(
    title="personalized semi-supervised learning with helpers selected by uncertainty",
    paper="Shi et al., Uncertainty Minimization for Personalized Federated SSL",
    headline="personal",
    late="kept",
    settings=UmPfsslSettings,
    sizes=model_sizes,
    needs_unlabeled=True,
    semi=False,
    one_model=True,
    check_model=check_dropout,
    models={
        "image": "cnn2-dropout",
        "table": "mlp-dropout",
        "text": "text-cnn-dropout",
        "signal": "signal-cnn2-dropout",
    },
    large_messages=True,
    defenses=CHOOSING,
    instructions=Contract(
        (
            ScalarField("own", int, "the client's own number in the pool", low=0),
            ScalarField("train", bool, "is the client sampled, or does it only search?"),
            ScalarField("held", int, "version of its own model in the pool; 0: none", low=0),
            TensorField("numbers", "int64", ("N",), "models sent", False, low=0, needs=("roles",)),
            TensorField("versions", "int64", ("N",), "of each", False, low=1, needs=("numbers",)),
            TensorField(
                "roles",
                "int64",
                ("N",),
                "0 to compare, 1 to fill the list, 2 a newer version of a helper",
                required=False,
                low=0,
                needs=("versions",),
            ),
            WeightsField("models", "the models sent", required=False, stacked="N"),
        )
    ),
    replies=Contract(
        (
            TensorField("numbers", "int64", ("H",), "the helper list, itself included", ids="K"),
            TensorField("versions", "int64", ("H",), "the version held of each", low=0),
            TensorField("relations", "float64", ("H",), "Corr of each", low=0),
            WeightsField("weights", "the private model, if the pool's is older", required=False),
            ScalarField("replaced", int, "helpers replaced in this round", low=0),
            ScalarField("relation", float, "mean Corr of the list", low=0, high=1),
            ScalarField(
                "pseudo_error",
                float,
                "share of pseudo-labels that are wrong, where the truth is known",
                required=False,
                low=0,
                high=1,
            ),
        )
    ),
    metrics={
        "replaced": "helpers replaced",
        "relation": "relation of the helpers",
        "models_sent": "models sent to clients",
    },
    privacy=Protection(unsupported="helpers are chosen by metrics of the client's own samples"),
)
