"""Declaration of FD: settings and messages."""

from pydantic import Field

from fedhet.methods.spec import CLASS_SUMS, MethodSpec, Protection, Sums
from fedhet.settings.defense import ROBUST
from fedhet.settings.schema import MethodSettings, NonNegative
from fedhet.wire.contract import Contract, TensorField, all_or_none


class FdSettings(MethodSettings):
    """Settings of FD."""

    gamma: NonNegative = Field(
        1.0,
        description="weight of the cross-entropy with the mean probabilities of the other clients",
    )


SPEC = MethodSpec(
    title="class-wise mean probabilities of the other clients",
    paper="Jeong et al., Communication-Efficient On-Device Machine Learning",
    headline="common",
    paper_model="each device's model",
    late="kept",
    only_tasks="it averages probabilities of each class",
    settings=FdSettings,
    defenses=ROBUST,
    instructions=Contract(
        all_or_none(
            TensorField("classes", "int64", ("P",), "classes of the other clients", ids="C"),
            TensorField(
                "probabilities",
                "float32",
                ("P", "C"),
                "mean probabilities of each class, averaged over the other clients",
                distribution=True,
            ),
        )
    ),
    replies=Contract(
        (
            TensorField("classes", "int64", ("P",), "classes of the client", ids="C"),
            TensorField(
                "probabilities",
                "float32",
                ("P", "C"),
                "mean probabilities of each class",
                distribution=True,
            ),
        )
    ),
    metrics={
        "classes_covered": "classes with an average",
        "classes_taught": "number of classes that a client learns from other clients, averaged "
        "over clients",
    },
    privacy=Protection(CLASS_SUMS, vectors=1, norm=1.0),
    sums=Sums(unsupported="each client receives the average without its own contribution"),
)
