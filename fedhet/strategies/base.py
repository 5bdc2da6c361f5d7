"""Base class for strategies, with the hooks that a method implements on the server.

`fedhet.server.federation` calls the hooks in each round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fedhet.base.arrays import Array, group
from fedhet.base.errors import DataError, FedhetError
from fedhet.client_runtime.samples import ServerRecord, write_server_record
from fedhet.config.resolve import Config
from fedhet.data.dataset import Split
from fedhet.data.public import DERIVED, check_no_overlap
from fedhet.data.store import RunData
from fedhet.methods.spec import MethodSpec
from fedhet.models import HetModel, build
from fedhet.runs.log import RunLog
from fedhet.server.members import Member, first_of_pool
from fedhet.server.reply import Reply
from fedhet.server.round import Selection
from fedhet.server.selection import ClientSampler
from fedhet.tasks import Task, task_for
from fedhet.wire.contract import Sizes
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge

__all__ = ["HetStrategy", "Reply", "Selection", "ServerModel"]


@dataclass(frozen=True)
class ServerModel:
    """Model in a saved state of a server."""

    weights: Mapping[str, Array]
    """Tensors of the model; all other tensors of its architecture stay on the clients."""
    architecture: str
    """Name of the model, as in `models.pool`."""
    width: int | None = None
    """Width of the features before the head, or None for the model's default."""
    field: str = "weights"
    """Field of the evaluation instruction that contains the weights; "" if only the server
    evaluates the model."""
    needs_extractor: bool = False
    """Whether the model maps features of a client's extractor, so that only clients can use it."""

    @classmethod
    def of_learner(cls, config: Config, state: Mapping[str, Array]) -> ServerModel:
        """Return the model of a `Learner` whose architecture is the setting `server_model`."""
        settings: Any = config.method_settings
        return cls(group(state, "model"), settings.server_model, field="")


class HetStrategy:
    """Base class for strategies. A strategy is the server side of a method.

    A subclass sets `spec` and implements the hooks. Only `aggregate` is required; the defaults of
    the other hooks suit a method that sends `self.instruction` to every client.

    Example:
        A method whose server averages one vector::

            class MeanStrategy(HetStrategy):
                spec = MethodSpec(
                    title="mean of one vector per client",
                    paper="no paper",
                    headline="personal",
                    replies=Contract((TensorField("vector", "float32", (8,), "vector"),)),
                    metrics={"mean": "mean of the vectors"},
                )

                def aggregate(self, round, replies):
                    vectors = [reply.knowledge.tensors["vector"] for reply in replies]
                    return {"mean": float(np.mean(vectors))}
    """

    spec: MethodSpec
    """Declaration of the method, set by the subclass."""
    instruction = Knowledge()
    """Instruction for all clients, if the method sends the same instruction to every client."""

    def __init__(self, config: Config, log: RunLog, data: RunData | None = None) -> None:
        self.run, self.settings, self.log = config.run, config.method_settings, log
        self.data = data or RunData.for_run(config.run)
        self.spec = config.method.spec  # The configured method may extend the subclass's method.
        self.members: dict[str, Member] = {}
        """Clients of the run by name, set before `init`."""
        self.sampler = ClientSampler(self.run)

    # Hooks that a method implements.

    def init(self) -> None:
        """Initialize the method's state. `self.members` is already set."""

    def select(self, round: int, members: Sequence[ClientInfo]) -> Selection:
        """Select the clients for a round.

        The default selects the fraction of clients given by the setting `fraction`, but at least
        one client. It applies the selection strategy in `[pace]`.

        Args:
            round: Round number, starting at 1.
            members: Available clients, excluding clients that are busy or backing off.

        Returns:
            The clients that train, and the clients that are called without training.
        """
        return Selection(tuple(self.sampler.choose(round, members)))

    def instruct(self, round: int, client: ClientInfo) -> Knowledge:
        """Return the instruction for a client.

        The default returns `self.instruction`. An object that is returned for several clients is
        encoded only once. With `spec.large_messages`, this hook runs in another thread, just before
        the instruction is sent.

        Args:
            round: Round number.
            client: The client's name, model, task and number of samples.

        Returns:
            Tensors and scalars that satisfy `spec.instructions`.
        """
        return self.instruction

    def accept(self, round: int, reply: Reply) -> Reply:
        """Return the part of a reply that `aggregate` needs, or reject the reply.

        Weights stay on disk until `aggregate` returns, and are read each time they are used. A
        method must copy the arrays that it keeps, e.g. with `numpy.array`.

        Args:
            round: Round number.
            reply: A reply that satisfies `spec.replies`.

        Returns:
            The reply, or a copy without the tensors that have already been used.

        Raises:
            KnowledgeError: If the method rejects the reply.
        """
        return reply

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Aggregate the accepted replies of a round.

        Args:
            round: Round number.
            replies: At least one reply, sorted by client name.

        Returns:
            The method's metrics of the round, by the names declared in `spec.metrics`.

        Raises:
            DivergedError: If training of the server's model diverged. The model must be unchanged.

        Example:
            Average the field `weights`, weighted by each client's number of samples::

                models = [(reply.knowledge.group("weights"), reply.weight) for reply in replies]
                self.weights = average_weights(models)
                return {}
        """
        raise NotImplementedError(f"{type(self).__name__} must implement aggregate")

    def forget(self, client: str) -> None:
        """Discard the contributions of a client that left, failed repeatedly, or was excluded.

        Args:
            client: Name of the client.
        """

    def eval_instruction(self, round: int, client: ClientInfo) -> Knowledge | None:
        """Return the instruction for the client's evaluation after a round.

        A method implements this hook if clients evaluate models of the server. With
        `spec.learns_last`, a client first trains on the instruction of the last round.

        Args:
            round: Round number.
            client: The client that evaluates.

        Returns:
            The instruction, or None if the client needs no instruction. In that case, the client
            evaluates only if its models have changed, and gets an empty instruction.
        """
        return None

    def eval_models(self) -> Mapping[str, nn.Module]:
        """Return the server models to evaluate on the common test set, by kind."""
        return {}

    def state_dict(self) -> dict[str, Array]:
        """Return the state for the checkpoint, as arrays by name."""
        return {}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore the state returned by `state_dict`, after `init` has been called."""

    @classmethod
    def saved_models(
        cls, config: Config, directory: Path, state: Mapping[str, Array], client: ClientInfo
    ) -> Mapping[str, ServerModel]:
        """Return the server's models in a saved state, by kind, for use after the run.

        This hook makes `fedhet predict DIR server` available. It is called without a strategy
        object, once for each architecture of the clients, and must not read any data.

        Args:
            config: Configuration of the run; `config.method_settings` are the method's settings.
            directory: Directory of the run.
            state: State returned by `state_dict`.
            client: A client with this architecture.

        Returns:
            The models by kind. Use the kind under which the models are evaluated, e.g. "global".
            By default, the server has no models.

        Example:
            Models with the clients' architecture, stored in the group `weights`::

                return {"global": ServerModel(group(state, "weights"), client.model)}
        """
        return {}

    def sizes(self, client: ClientInfo) -> Sizes:
        """Return the axis sizes and weight shapes against which a client's replies are checked.

        The default calls `spec.sizes`. Override it if a size changes during a run, such as the
        number of requested public samples.
        """
        return self.spec.sizes(self.settings, client)

    def instruction_sizes(self, client: ClientInfo) -> Sizes:
        """Return the axis sizes and weight shapes against which instructions are checked.

        The default calls `spec.sizes`. Override it if the client overrides `sizes`. An axis without
        a size may have any size.
        """
        return self.spec.sizes(self.settings, client)

    def evaluates_after(self, round: int) -> bool:
        """Return whether clients evaluate after `aggregate` rather than directly after training.

        The default is True if the method implements `eval_instruction`.
        """
        return type(self).eval_instruction is not HetStrategy.eval_instruction

    # Helpers that methods may call.

    @property
    def reference_client(self) -> ClientInfo:
        """Client with the sample shape and the classes of the server's models and data."""
        return first_of_pool(self.members.values(), self.run.models.pool)

    @property
    def task(self) -> Task:
        """Task of the run (losses and predictions), without the scale of its targets."""
        return task_for(self.run.data)

    def build_model(self, name: str = "", feature_dim: int | None = None) -> HetModel:
        """Build a new network with the inputs and outputs of the clients' models.

        Args:
            name: Name of the model, or "" for the architecture of the reference client.
            feature_dim: Width of the features before the head, or None for the model's default.
        """
        client = self.reference_client
        options: dict[str, Any] = {"kind": client.kind, "seed": self.run.seed}
        return build(
            name or client.model, client.shape, client.classes, feature_dim=feature_dim, **options
        )

    def public_set(self, *, labeled: bool) -> Split:
        """Return the public set, scaled like the clients' samples.

        Args:
            labeled: Whether the method uses the labels.

        Raises:
            DataError: If the public set does not match the task, differs from the sites' public
                set, or is another dataset with samples of the common test set.
            SettingsError: If `labeled` is set and the public set has no labels.
        """
        client = self.reference_client
        public = self.data.public_set(client, labeled=labeled)
        site = next((m.info for m in self.members.values() if m.info.public), None)
        if site and site.public != self.data.public_digest(client):
            raise DataError(
                "data.public-dataset: the server's public set differs from the public set of "
                f"client {site.name}. Copy the same files to the server and the sites."
            )
        # Samples from the run's own training set may equal a test sample only by chance.
        is_other_dataset = self.run.data.public_dataset not in ("", *DERIVED)
        if is_other_dataset and (common := self.common_test()):
            check_no_overlap(public, common, "the common test set")
        return public

    def common_test(self) -> Split | None:
        """Return the scaled common test set, or None if no such set exists for the task."""
        return self.data.common_test_of(self.reference_client)

    # Called by the server.

    def write_record(self, clients: Sequence[ClientInfo]) -> None:
        """Write the record with which the models in a checkpoint can be used after the run."""
        dataset = None
        # A simulation has read the dataset. In a deployment, the server may not need it.
        if not (self.log.is_deployed or clients[0].own_data):
            with contextlib.suppress(FedhetError):
                dataset = self.data.dataset
        record = ServerRecord.of_run(
            self.log.run_name, self.log.config, clients, self.reference_client, dataset
        )
        write_server_record(self.log.directory, record)
