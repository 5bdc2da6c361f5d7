"""Declaration of FedRep: settings and messages.

Liam Collins, Hamed Hassani, Aryan Mokhtari and Sanjay Shakkottai, Exploiting Shared Representations
for Personalized Federated Learning, ICML 2021.
"""

from dataclasses import replace

from pydantic import Field

from fedhet.methods import fedper
from fedhet.methods.spec import DP_SGD, Passes, local_passes
from fedhet.settings.run import TrainingSettings
from fedhet.settings.schema import Count

EXTENDS = "fedavg"
"""Method whose strategy FedRep uses."""


class FedRepSettings(fedper.FedPerSettings):
    """Settings of FedRep."""

    head_epochs: Count = Field(
        1,
        description="epochs per round that train only the head, before the local epochs, which "
        "train only the extractor",
    )


def passes(settings: FedRepSettings, training: TrainingSettings, rounds: int) -> tuple[Passes, ...]:
    """Return the passes over the samples that train the head, and that train the extractor."""
    head = Passes(rounds, training.batch_size, settings.head_epochs)
    return (head, *local_passes(settings, training, rounds))


SPEC = replace(
    fedper.SPEC,
    needs_task="outputs",
    only_tasks="models of this task have no head",
    title="FedPer whose clients train the head first, and then the extractor",
    paper="Collins et al., Exploiting Shared Representations for Personalized Federated Learning",
    settings=FedRepSettings,
    privacy=replace(DP_SGD, passes=passes),
)
