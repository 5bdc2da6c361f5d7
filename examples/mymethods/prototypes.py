"""Method that averages class prototypes (mean features), which attract each client's features.

Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet.algorithms.classwise import ClassSums
from fedhet.base.arrays import Array
from fedhet.clients.base import HetClient
from fedhet.methods.spec import MethodSpec
from fedhet.settings.schema import Count, MethodSettings, NonNegative
from fedhet.strategies.base import HetStrategy, Reply
from fedhet.wire.contract import Contract, Sizes, TensorField
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge

FIELDS = Contract(
    (
        TensorField("classes", "int64", ("P",), "classes with a prototype", ids="C"),
        TensorField("features", "float32", ("P", "D"), "mean features of each class"),
    )
)


class PrototypeSettings(MethodSettings):
    """Settings of the method, set with options such as `--set prototypes.pull=0.5`."""

    pull: NonNegative = Field(1.0, description="weight of the distance to the class's prototype")
    feature_dim: Count = Field(32, description="width of the exchanged features (D)")


def sizes(settings: PrototypeSettings, client: ClientInfo) -> Sizes:
    """Return the sizes of the axes C and D of FIELDS."""
    return Sizes({"C": client.classes, "D": settings.feature_dim})


class PrototypeStrategy(HetStrategy):
    """Server side: averages the class means, with equal weight for each client."""

    spec = MethodSpec(
        title="class prototypes that attract features",
        paper="Tan et al., FedProto",
        headline="personal",
        settings=PrototypeSettings,
        sizes=sizes,
        kinds=("private", "prototype"),
        instructions=FIELDS,
        replies=FIELDS,
        metrics={"classes_covered": "classes with a prototype"},
    )
    settings: PrototypeSettings

    def init(self) -> None:
        """Start without prototypes."""
        self.prototypes: dict[int, Array] = {}

    def instruct(self, round: int, client: ClientInfo) -> Knowledge:
        """Send all prototypes."""
        classes = np.array(sorted(self.prototypes), np.int64)
        features = [self.prototypes[label] for label in classes.tolist()]
        width = self.settings.feature_dim
        stacked = np.array(features, np.float32).reshape(-1, width)
        return Knowledge({"classes": classes, "features": stacked})

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Average the features of each class over the clients that have the class."""
        seen: dict[int, list[Array]] = {}
        for reply in replies:
            sent = reply.knowledge.tensors
            for label, features in zip(sent["classes"].tolist(), sent["features"], strict=True):
                seen.setdefault(label, []).append(features)
        self.prototypes |= {label: np.mean(each, axis=0) for label, each in seen.items()}
        return {"classes_covered": float(len(self.prototypes))}

    def state_dict(self) -> dict[str, Array]:
        """Return the prototypes, so that a run can be resumed."""
        return {str(label): features for label, features in self.prototypes.items()}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore the prototypes from `state_dict`."""
        self.prototypes = {int(label): features for label, features in state.items()}


class NearestPrototype(nn.Module):
    """Classifier that predicts the class of the nearest prototype."""

    def __init__(self, extractor: nn.Module, prototypes: Tensor, known: Tensor) -> None:
        super().__init__()
        self.extractor, self.prototypes, self.known = extractor, prototypes, known

    def forward(self, x: Tensor) -> Tensor:
        """Return the negative distances [N, C] of samples [N, ...] to the prototypes."""
        distances = torch.cdist(self.extractor(x).float(), self.prototypes)
        return (-distances).masked_fill(~self.known, -1e9)


class PrototypeClient(HetClient):
    """Client side: minimizes cross-entropy plus the distance of features to class prototypes."""

    settings: PrototypeSettings

    def setup(self) -> dict[str, nn.Module]:
        """Build the private model with the feature width of the settings."""
        return {"private": self.build_model(self.settings.feature_dim)}

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Train for the local epochs, and return the class means of the last epoch."""
        model = self.network.train()
        prototypes, known = self.by_class(knowledge)
        sums = ClassSums(self.info.classes, self.settings.feature_dim, self.compute.device)

        def loss_of(x: Tensor, y: Tensor) -> Tensor:
            features, logits = model.features_and_logits(x)
            sums.add(features, logits, y)
            distance = (features - prototypes[y]).square().mean(1) * known[y]
            return F.cross_entropy(logits, y) + self.settings.pull * distance.mean()

        self.train_own(
            loss_of,
            model,
            self.optimization(model.parameters()),
            self.generator(round, "batches"),
            before_epoch=lambda _: sums.clear(),
        )
        means = sums.means()
        return Knowledge({"classes": means.classes, "features": means.features})

    def eval_models(self, knowledge: Knowledge) -> dict[str, nn.Module]:
        """Return the private model and, if prototypes exist, the nearest-prototype classifier."""
        models: dict[str, nn.Module] = {"private": self.private}
        if "classes" in knowledge.tensors and len(knowledge.tensors["classes"]):
            extractor = self.network.extractor
            models["prototype"] = NearestPrototype(extractor, *self.by_class(knowledge))
        return models

    def by_class(self, knowledge: Knowledge) -> tuple[Tensor, Tensor]:
        """Return prototypes [C, D], indexed by class, and a mask [C] of the known classes."""
        shape = self.info.classes, self.settings.feature_dim
        prototypes = torch.zeros(shape, device=self.compute.device)
        rows = torch.tensor(knowledge.tensors["classes"], device=self.compute.device)
        prototypes[rows] = torch.tensor(knowledge.tensors["features"], device=self.compute.device)
        known = torch.zeros(shape[0], dtype=torch.bool, device=self.compute.device)
        known[rows] = True
        return prototypes, known
