"""Declaration of UM-pFSSL: settings and messages."""

from typing import Literal

from pydantic import Field

from fedhet.algorithms import Divergence, RelationKind
from fedhet.kinds import KINDS
from fedhet.methods.spec import MethodSpec, Protection, Sums, model_shapes
from fedhet.settings.defense import CHOOSING
from fedhet.settings.schema import Count, CountOrNone, MethodSettings, invalid_setting
from fedhet.wire.contract import Contract, ScalarField, Sizes, TensorField, WeightsField
from fedhet.wire.identity import ClientInfo


class UmPfsslSettings(MethodSettings):
    """Settings of UM-pFSSL."""

    helpers: Count = Field(5, description="length M of a helper list, including the client itself")
    replace: CountOrNone = Field(2, description="maximum number R of helpers replaced in a round")
    search_rounds: CountOrNone = Field(
        30, description="number F of initial rounds in which clients search for helpers"
    )
    refresh: Literal["auto"] | Count = Field(
        "auto",
        description="interval nu between updates of the helpers' models, in rounds; auto = 1 / "
        "fraction",
    )
    warm_up: CountOrNone = Field(
        20,
        description="warm-up epochs of all clients on labeled data, before round t = 1",
    )
    warm_up_steps: CountOrNone = Field(
        200, description="minimum number of optimizer steps in the warm-up; 0 = no minimum"
    )
    passes: Count = Field(8, description="number T of dropout masks per prediction")
    relation: RelationKind = Field(
        "ta",
        description="terms of the relation Corr: entropy (en), test accuracy (ta), or both",
    )
    divergence: Divergence = Field(
        "forward",
        description="direction of Eq. 5: KL(pseudo-label, model), or KL(model, pseudo-label) as in "
        "the paper",
    )
    pseudo_labels: bool = Field(
        True, description="whether to train on pseudo-labels; false = train on labels alone"
    )

    def refresh_rounds(self, fraction: float) -> int:
        """Return the refresh interval nu, given the fraction of clients sampled per round."""
        return max(1, round(1 / fraction)) if isinstance(self.refresh, str) else self.refresh


def model_sizes(settings: UmPfsslSettings, client: ClientInfo) -> Sizes:
    """Return the size of axis C (classes), and the shapes of a model and of stacked models."""
    shapes = model_shapes(client)
    return Sizes({"C": client.classes}, {"weights": shapes, "models": shapes})


def check_dropout(settings: UmPfsslSettings, client: ClientInfo) -> None:
    """Reject models without dropout, because all passes would yield the same predictions.

    Raises SettingsError if the client's model has no dropout.
    """
    from fedhet import models  # Import lazily, because these modules import PyTorch.
    from fedhet.algorithms.uncertainty import has_dropout

    model = models.build(client.model, client.shape, client.classes, seed=0, kind=client.kind)
    if not has_dropout(model):
        expected = f"a model with dropout, such as {KINDS[client.kind].dropout_model}"
        raise invalid_setting("models.pool", client.model, expected)


SPEC = MethodSpec(
    title="personalized semi-supervised learning with helpers selected by uncertainty",
    paper="Shi et al., Uncertainty Minimization for Personalized Federated SSL",
    headline="personal",
    paper_model="each client's personalized model",
    late="kept",
    only_tasks="its pseudo-labels are classes",
    settings=UmPfsslSettings,
    sizes=model_sizes,
    needs_unlabeled=True,
    semi=False,
    one_model=True,
    check_model=check_dropout,
    client_model="dropout_model",
    large_messages=True,
    defenses=CHOOSING,
    instructions=Contract(
        (
            ScalarField("own", int, "number of the client in the pool", low=0),
            ScalarField("train", bool, "whether the client trains; otherwise it only searches"),
            ScalarField(
                "held", int, "version of the client's model in the pool; 0 = no model", low=0
            ),
            TensorField(
                "numbers",
                "int64",
                ("N",),
                "numbers of the sent models",
                False,
                low=0,
                needs=("roles",),
            ),
            TensorField(
                "versions",
                "int64",
                ("N",),
                "version of each model",
                False,
                low=1,
                needs=("numbers",),
            ),
            TensorField(
                "roles",
                "int64",
                ("N",),
                "role of each model: 0 = candidate, 1 = fills the list, 2 = update of a helper",
                required=False,
                low=0,
                needs=("versions",),
            ),
            WeightsField("models", "weights of the sent models", required=False, stacked="N"),
        )
    ),
    replies=Contract(
        (
            TensorField(
                "numbers", "int64", ("H",), "helper list, including the client itself", ids="K"
            ),
            TensorField("versions", "int64", ("H",), "version of each helper", low=0),
            TensorField("relations", "float64", ("H",), "Corr of each helper", low=0),
            WeightsField(
                "weights",
                "private model, if it is newer than the version in the pool",
                required=False,
            ),
            ScalarField("replaced", int, "number of helpers replaced in this round", low=0),
            ScalarField("relation", float, "mean Corr over the list", low=0, high=1),
            ScalarField(
                "pseudo_error",
                float,
                "fraction of wrong pseudo-labels, if the true labels are known",
                required=False,
                low=0,
                high=1,
            ),
        )
    ),
    metrics={
        "replaced": "helpers replaced",
        "relation": "mean relation of the helpers",
        "models_sent": "number of models sent to clients",
        "pseudo_error": "fraction of wrong pseudo-labels",
    },
    privacy=Protection(
        unsupported="helpers are selected by metrics computed on the client's samples"
    ),
    sums=Sums(unsupported="the server forwards the models of individual clients"),
)
