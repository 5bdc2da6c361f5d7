"""Declaration of FedL2G: settings and messages."""

from typing import Literal

from pydantic import Field

from fedhet.algorithms import Guide
from fedhet.kinds import KINDS
from fedhet.methods.spec import MethodSpec, Protection, Sums
from fedhet.settings.defense import ROBUST
from fedhet.settings.schema import (
    Count,
    CountOrNone,
    MethodSettings,
    Positive,
    invalid_setting,
)
from fedhet.wire.contract import Contract, Sizes, TensorField
from fedhet.wire.identity import ClientInfo


class FedL2gSettings(MethodSettings):
    """Settings of FedL2G."""

    guide: Guide = Field(
        "logits",
        description="output that the guiding vectors guide: logits (FedL2G-l) or features "
        "(FedL2G-f)",
    )
    feature_dim: Count = Field(64, description="width D of the features, for guide = features")
    quiz_samples: Count = Field(
        10,
        description="number of samples that a client excludes from training as its quiz set, at "
        "least 2; at most a fifth of its samples",
    )
    study_samples: Count = Field(
        10, description="number of samples for the step before the quiz, drawn in each round"
    )
    study_lr: Positive = Field(
        0.01, description="learning rate of the step before the quiz (gradient descent)"
    )
    server_lr: Literal["auto"] | Positive = Field(
        "auto",
        description="learning rate of the guiding vectors (SGD); auto = 0.1 for logits, 100 for "
        "features",
    )
    warm_up_rounds: CountOrNone = Field(
        0, description="number of initial rounds in which only the guiding vectors are trained"
    )

    @property
    def width(self) -> int | None:
        """Width of the features before the head, or None for the model's default."""
        return self.feature_dim if self.guide == "features" else None

    @property
    def rate(self) -> float:
        """Learning rate of the guiding vectors."""
        if isinstance(self.server_lr, str):
            return {"logits": 0.1, "features": 100.0}[self.guide]
        return self.server_lr


def vector_sizes(settings: FedL2gSettings, client: ClientInfo) -> Sizes:
    """Return the sizes of the axes C (classes) and W (width of the guiding vectors)."""
    return Sizes({"C": client.classes, "W": settings.width or client.classes})


def check_derivatives(settings: FedL2gSettings, client: ClientInfo) -> None:
    """Raise SettingsError if a layer of the client's model has no second derivatives."""
    from fedhet import models  # Import lazily, because these modules import PyTorch.
    from fedhet.algorithms.guiding import lacks_second_derivatives

    kind = KINDS[client.kind]
    model = models.build(client.model, client.shape, client.classes, seed=0, kind=client.kind)
    if lacks_second_derivatives(model.train(), kind.blank(2, client.shape)):
        expected = f"a model whose layers all have second derivatives, such as {kind.model}"
        raise invalid_setting("models.pool", client.model, expected)


SPEC = MethodSpec(
    title="vectors that guide each class's logits or features, trained on held-out samples",
    paper="Zhang et al., FedL2G: Learning to Guide Local Training in Heterogeneous FL",
    headline="personal",
    paper_model="each client's model",
    late="averaged",
    only_tasks="it has a guiding vector for each class",
    settings=FedL2gSettings,
    sizes=vector_sizes,
    check_model=check_derivatives,
    defenses=ROBUST,
    instructions=Contract(
        (TensorField("vectors", "float32", ("C", "W"), "guiding vector of each class"),)
    ),
    replies=Contract(
        (
            TensorField("classes", "int64", ("P",), "classes in the client's study batch", ids="C"),
            TensorField(
                "gradients",
                "float32",
                ("P", "W"),
                "gradient of the quiz loss for the guiding vector of each class",
            ),
        )
    ),
    metrics={
        "classes_covered": "classes with a gradient",
        "gradient_norm": "norm of the averaged gradient",
    },
    privacy=Protection(
        unsupported="the gradients of the guiding vectors are computed from the samples without "
        "noise"
    ),
    sums=Sums(
        unsupported="a class may be in the study batch of only one client, whose gradient the sum "
        "would reveal"
    ),
)
