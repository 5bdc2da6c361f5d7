"""Base class for strategies: a Flower strategy that calls the hooks of a method.

In a round, the strategy calls `select` and `instruct`. It then decodes the replies, checks them
against the contract, passes them through the steps of `fedhet.server.steps` (such as simulated
attacks and robust aggregation), and calls `accept` for each remaining reply. Finally, it calls
`aggregate` and evaluates the models.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.common import EvaluateIns, EvaluateRes, FitIns, FitRes, Parameters, Scalar
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import Strategy
from torch import nn

from fedhet.base.arrays import Array, check_dtypes, group
from fedhet.base.errors import (
    DataError,
    FedhetError,
    InvalidInstructionError,
    KnowledgeError,
    StateError,
    definition_of,
)
from fedhet.base.metrics import is_shown, measured_names
from fedhet.client_runtime.samples import ServerRecord, write_server_record
from fedhet.config.resolve import Config
from fedhet.data.spec import Split
from fedhet.data.store import DERIVED, RunData, check_no_overlap
from fedhet.learning.devices import compute_for
from fedhet.methods.spec import MethodSpec
from fedhet.models import HetModel, build, evaluate_model
from fedhet.runs.log import RunLog
from fedhet.runs.measures import Measured, by_score_key, count_tested, mean_metrics
from fedhet.runs.records import Headline
from fedhet.runs.storage import Checkpoint
from fedhet.server.calls import (
    NOTHING,
    Failures,
    NamedProxy,
    RoundResults,
    UserCodeFaults,
    is_user_code_error,
    name_of,
    reasons,
)
from fedhet.server.codec import Codec, InstructionEncoder, without_versions
from fedhet.server.members import (
    HELD_OUT_KINDS,
    ClientHealth,
    HeldOutClients,
    Member,
    Members,
    first_of_pool,
)
from fedhet.server.open_calls import LateReplies, OpenCalls
from fedhet.server.pace import Collector
from fedhet.server.reply import Reply, ReplySpool
from fedhet.server.round import RoundState, Selection, track_divergence
from fedhet.server.selection import ClientSampler
from fedhet.server.steps import steps_of
from fedhet.server.unmasking import Unmasking
from fedhet.tasks import Task, task_for
from fedhet.wire.contract import Sizes
from fedhet.wire.encodings import Coder
from fedhet.wire.identity import SERVER, ClientInfo
from fedhet.wire.knowledge import Knowledge
from fedhet.wire.masking import MASKED_CONTRACT

__all__ = ["HetStrategy", "Reply", "Selection", "ServerModel"]

PACE = "pace"
"""Checkpoint metadata key for the calls in progress and the history of client selection."""


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


class HetStrategy(Strategy):
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
        self.spec = config.method.spec  # The configured method may extend the subclass's method.
        self.data = data or RunData.of(config.run)
        self.members: dict[str, Member] = {}
        self._held_out = HeldOutClients(self.run, self.spec)
        self._code_faults = UserCodeFaults(log.notice, strict=self.run.engine.strict)
        self._members = Members.of(config, self.data, log.notice, self._code_faults)
        engine, pace, spec = self.run.engine, self.run.pace, self.spec
        limit = int(engine.max_payload_mb * 1e6)
        late = LateReplies(log.directory, log.run_name, limit)
        keep_all = pace.may_be_late and spec.late != "refused"
        calls = OpenCalls(late, keep_all=keep_all)
        health = ClientHealth(engine.max_refusals, engine.max_silences, log.notice)
        self.state = RoundState(log.workers, log.notice, health, Headline.of(spec), calls)
        # The codec encodes instructions and decodes replies. The spool stores replies on disk.
        self._codec = Codec(
            log.run_name,
            config.method,
            limit,
            self.state,
            self.run.metrics,
            max_age=pace.max_age,
            encoder=InstructionEncoder(
                Coder.for_contract(self.run.wire, spec.instructions, self.run.seed)
            ),
            per_target=self.task.outputs(1),
        )
        replies, self._unmasking = spec.replies, None
        if self.run.privacy.secure_aggregation:
            replies = MASKED_CONTRACT
            self._unmasking = Unmasking(
                config, log.run_name, self.state, log.directory, engine.join_timeout
            )
        self._spool = ReplySpool(log.directory / "inbox", limit, replies, calls.bases_of)
        self._used_spool = self._spool if spec.large_messages or replies.weights else None
        # Limit the number of large instructions that exist at the same time.
        self._turn = threading.BoundedSemaphore(engine.in_flight or log.workers)
        self.collector = Collector(self.run, self._codec, calls, self._used_spool)
        self._sampler = ClientSampler(self.run)
        self._instruct_error: Exception | None = None
        """Error in the creation of a large instruction, which occurred in another thread."""

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
        return Selection(tuple(self._sampler.choose(round, members)))

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
        classes = client.classes if labeled else None
        public = self.data.public_set(client.kind, client.shape, classes, client.order)
        site = next((m.info for m in self.members.values() if m.info.public), None)
        if site and site.public != self.data.public_digest(client.kind, client.shape):
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
        client = self.reference_client
        return self.data.common_test_of(client.kind, client.shape, client.order)

    # Flower's interface, in the order of a round.

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters:
        """Wait for clients, read their descriptions, and initialize the method."""
        self.log.waiting(f"waiting for {self.run.clients} clients to load data and build models")
        self._spool.clear()  # An earlier process may have left replies on disk.
        if not self.log.resumed:
            self.state.calls.load_dict({}, is_simulated=False)
        all_members = self._members.wait_for_first(
            client_manager, self.run.clients, self.run.engine
        )
        self.members = self._held_out.split_off(all_members)
        infos = [member.info for member in all_members.values()]
        # If the server can read the names of classes or targets, the names label their metrics.
        class_names: Sequence[str] = ()
        num_labels = infos[0].classes // self.task.outputs(1)
        has_labels = not all(map(is_shown, measured_names(self.run.metrics, num_labels)))
        if has_labels and not any(info.own_data for info in infos):
            with contextlib.suppress(FedhetError):
                class_names = self.data.dataset.classes
        self.log.begin(infos, class_names)
        self._write_record(infos)
        if self._unmasking:
            self._unmasking.check(infos)
        if self._held_out.notice:
            self.log.notice(self._held_out.notice)
        self.state.scores.mark_outdated(self.members)
        self.spec.check_model(self.settings, self.reference_client)
        # Use as many threads as the clients, because the number of threads affects floating-point
        # sums.
        torch.set_num_threads(self.run.engine.threads)
        self.init()
        if self.log.resumed:
            self._resume(self.log.resumed)
        return NOTHING

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Select the clients of a round, and return an instruction for each client."""
        self.state.start(server_round)
        self.run = self.log.with_last_round(self.run)
        # Wait for enough clients for a sum; otherwise, all remaining rounds would pass within
        # seconds.
        needed = self._unmasking.min_clients if self._unmasking else 0
        present = self._held_out.split_off(self._members.wait_for(client_manager, needed))
        self.members = present or self.members
        self.log.clients_joined(member.info for member in self.members.values())
        absent = self.log.models.keys() - self.members.keys() - self._held_out.names
        self.state.scores.mark_outdated(self._held_out.names)
        health = self.state.health
        eligible = health.eligible(server_round, self.members)
        if len(eligible) < needed:
            reason = partial(health.exclusion_reason, server_round)
            eligible = [name for name in self.members if reason(name) != "excluded"]
        at_work = self.collector.clients_at_work
        idle = [self.members[name].info for name in eligible if name not in at_work]
        self._sampler.start(len(eligible) - len(idle))
        selection = self.select(server_round, idle) if idle else Selection(())
        if self._unmasking:
            summed = self._unmasking.start(server_round, self.members, selection.training)
            selection = Selection(tuple(name for name in selection.training if name in summed))
        self.state.record_selection(selection, self._sampler.needed(selection), at_work, absent)
        self.log.round_started(
            server_round, selection.names, self.state.exclusion_reasons(self.members)
        )
        after_training = self._is_evaluated(server_round) and not self.evaluates_after(server_round)
        evaluating = selection.training if after_training else ()
        selected = [self.members[name] for name in selection.names]
        calls: list[tuple[ClientProxy, FitIns]] = []
        if not self.spec.large_messages:
            instructions = {m.info.name: self.instruct(server_round, m.info) for m in selected}
            check_instructions(self, server_round, instructions, self.members)
            payloads = self._codec.encode_all(server_round, instructions)
        for member in selected:
            name = member.info.name
            config: dict[str, Scalar] = {
                "evaluate": name in evaluating,
                **self.log.best_round_config,
                **(self._unmasking.config(name) if self._unmasking else {}),
            }
            if self.spec.large_messages:
                make_payload = partial(self._encode, server_round, member.info)
                proxy = self._proxy(member, make_payload=make_payload, turn=self._turn)
                calls.append((proxy, FitIns(NOTHING, config)))
            else:
                calls.append((self._proxy(member), FitIns(payloads[name], config)))
        self.state.clock.start_waiting()
        return calls

    def _encode(self, round: int, client: ClientInfo) -> Parameters:
        """Create and encode a large instruction, just before it is sent.

        The weights are not sent as differences, because differences would depend on the other
        clients.
        """
        try:
            instructions = {client.name: self.instruct(round, client)}
            check_instructions(self, round, instructions, self.members)
        except Exception as error:
            if is_user_code_error(error) or isinstance(error, InvalidInstructionError):
                self._instruct_error = error  # Do not count it as the client's failure.
            raise
        return self._codec.encode_all(round, instructions, differences=False)[client.name]

    def _proxy(self, member: Member, **options: Any) -> NamedProxy:
        """Return the proxy that sends a message to a member."""
        name = member.info.name
        return NamedProxy(
            name,
            member.proxy,
            on_reply=self.log.client_answered,
            message_without_base=partial(self._codec.message_without_base, name),
            spool=self._used_spool,
            **options,
        )

    def close_round(self, results: RoundResults) -> None:
        """Record the clients that replied before the round closed, and the late clients."""
        self.state.record_results(results, quiet=self.run.pace.is_simulated)
        self._sampler.record_durations(results.seconds)

    def aggregate_fit(
        self, server_round: int, results: list[tuple[ClientProxy, FitRes]], failures: Failures
    ) -> tuple[Parameters, dict[str, Scalar]]:
        """Decode and check the replies, and aggregate the replies that the method accepts."""
        self.state.clock.stop_waiting()
        if self._instruct_error is not None:
            raise self._instruct_error
        self._code_faults.report(failures)
        torch.set_num_threads(self.run.engine.threads)  # Another thread may have changed it.
        with self._spool.read():
            trained = {*self.state.selection.training, *self.state.calls.late_rounds}
            self.state.scores.mark_outdated(trained & {*self.state.expected})
            replies: Iterable[Reply] = self._codec.decode_all(results, failures, self.members)
            instruct = partial(self.instruct, server_round)
            steps = steps_of(
                self.run, self.spec, self.sizes, self.state, self.members, instruct, self._unmasking
            )
            for step in (*steps, self._accept):
                replies = step(replies)
            accepted = list(replies)
            names = {name for reply in accepted for name in reply.clients or (reply.client.name,)}
            sums = [reply.client.name for reply in accepted if reply.clients]
            if self.state.finalize(sorted(names), sums):
                # Restore the last state from which the clients received usable instructions.
                good = self.state.rollback.good
                tensors = self.log.checkpoints.read(good).tensors if good else {}
                self.init()
                if good:
                    self.load_state_dict(without_versions(tensors))
                self.state.record_rollback()
            elif accepted:
                with track_divergence(self.state, self.run):
                    metrics = self.aggregate(server_round, accepted)
                    if not isinstance(metrics, Mapping):
                        raise TypeError(f"aggregate must return a mapping, got {metrics!r:.100}")
                    self.state.add_metrics(metrics, declared=self.spec.metrics)
                    self.state.add_metrics(mean_metrics([r.measured.metrics for r in accepted]))
        return NOTHING, dict(self.state.record.method)

    def _accept(self, replies: Iterable[Reply]) -> Iterator[Reply]:
        """Yield the replies that the method accepts."""
        for reply in replies:
            with self.state.drop_on_error(reply.client.name):
                declared = reply.knowledge.declaring(self.spec.replies)
                reply = replace(reply, knowledge=declared)
                accepted = self.accept(self.state.record.round, reply)
                if not reply.clients:  # The clients of a sum were recorded earlier.
                    self.state.record_measured(reply.client.name, reply.measured)
                self._sampler.record_reply(reply, self.state.record.round)
                yield accepted

    def evaluate(self, server_round: int, parameters: Parameters) -> None:
        """Do nothing, because the server's models are evaluated when the round closes."""
        return

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        """Return an instruction for each client that evaluates after the round."""
        instructions: dict[str, Knowledge] = {}
        if self._is_evaluated(server_round):  # Exclude clients that failed in this round.
            for name in self.state.reachable(self.members.keys() - self.collector.clients_at_work):
                knowledge = self.eval_instruction(server_round, self.members[name].info)
                if knowledge is not None or self.state.scores.is_outdated(name):
                    instructions[name] = knowledge or Knowledge()
            if server_round == self.run.rounds:
                offer = partial(self.eval_instruction, server_round)
                instructions |= self._held_out.instructions(offer)
        if not instructions:
            self._finish_round()
            return []
        all_members, held_out = {**self.members, **self._held_out.members}, self._held_out.names
        check_instructions(self, server_round, instructions, all_members, training=False)
        payloads = self._codec.encode_all(server_round, instructions, training=False)
        calls: list[tuple[ClientProxy, EvaluateIns]] = [
            (
                self._proxy(all_members[name]),
                EvaluateIns(payload, {"unseen": True} if name in held_out else {}),
            )
            for name, payload in payloads.items()
        ]
        self.state.clock.start_waiting()
        return calls

    def aggregate_evaluate(
        self, server_round: int, results: list[tuple[ClientProxy, EvaluateRes]], failures: Failures
    ) -> tuple[float | None, dict[str, Scalar]]:
        """Record the clients' evaluations and close the round."""
        self.state.clock.stop_waiting()
        self._code_faults.report(failures)
        for name, reason in sorted(reasons(failures).items()):
            self.state.skip_evaluation(name, reason, "silent")
        all_members = {**self.members, **self._held_out.members}
        result_of = {name_of(proxy): result for proxy, result in results}
        for name, result in sorted(result_of.items()):
            with self.state.skip_evaluation_on_error(name):
                held_out, info = name in self._held_out.names, all_members[name].info
                kinds = HELD_OUT_KINDS if held_out else self.spec.kinds
                measured = self._codec.decode_evaluation(info, result, kinds)
                self.state.record_measured(name, measured)
        self._finish_round()
        return None, {}

    # Private helpers.

    def _resume(self, checkpoint: Checkpoint) -> None:
        """Restore the checkpoint of the last complete round.

        Raises StateError if it does not match the method.
        """
        try:
            self.state.load_json(str(checkpoint.metadata["state"]))
            pace = json.loads(str(checkpoint.metadata[PACE]))
            self.collector.load_dict(pace["collector"])
            self._sampler.load_dict(pace["selection"])
            tensors = self._codec.encoder.load(checkpoint.tensors, checkpoint.metadata)
            check_dtypes(tensors, self.state_dict())
            self.load_state_dict(tensors)
        except (LookupError, ValueError, TypeError, RuntimeError, AttributeError) as error:
            raise StateError(
                f"the checkpoint of round {checkpoint.round} in {self.log.directory} does not "
                f"match the method {self.run.method}: {error!r}"
            ) from error

    def _write_record(self, clients: Sequence[ClientInfo]) -> None:
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

    def _is_evaluated(self, round: int) -> bool:
        is_due = round % self.run.evaluate_every == 0 and round >= self.run.evaluate_from
        return is_due or round == self.run.rounds

    def _finish_round(self) -> None:
        evaluated = self._is_evaluated(self.state.record.round)
        models = self.eval_models() if evaluated else {}
        if models and (common := self.common_test()) is not None:
            compute, task = compute_for(self.run.engine), self.data.dataset.task
            scores = {
                ("common", kind): evaluate_model(model, common, compute, self.run.metrics, task)
                for kind, model in models.items()
            }
            measured = Measured(by_score_key(scores), tested=count_tested(scores))
            self.log.server_confusion = {kind: s.confusion for (_, kind), s in scores.items()}
            self.state.record_measured(SERVER, measured)
        for name in self.state.update_health(self.members):
            self.forget(name)
        self._sampler.finish()
        record = self.state.finish(evaluated=evaluated)
        self.log.round_finished(record)
        pace = {"collector": self.collector.to_dict(), "selection": self._sampler.to_dict()}
        metadata = {
            "state": self.state.to_json(),
            PACE: json.dumps(pace),
            **self._codec.encoder.metadata(),
        }
        tensors = {**self.state_dict(), **self._codec.encoder.state_dict()}
        kept = {self.state.rollback.good, self.log.best_round}
        self.log.checkpoints.write(record.round, tensors, metadata, kept)
        self.state.calls.remove_used()


def check_instructions(
    strategy: HetStrategy,
    round: int,
    instructions: Mapping[str, Knowledge],
    members: Mapping[str, Member],
    *,
    training: bool = True,
) -> None:
    """Check instructions before they are sent, because clients would have to reject them.

    An instruction for several clients is checked once for each distinct set of sizes. Raises
    InvalidInstructionError if an instruction violates the contract.
    """
    checked: dict[int, list[Sizes]] = {}
    hook = type(strategy).instruct if training else type(strategy).eval_instruction
    for name, knowledge in instructions.items():
        if not isinstance(knowledge, Knowledge):
            raise TypeError(f"{hook.__name__} must return Knowledge, got {knowledge!r:.100}")
        if not (training or knowledge.tensors or knowledge.scalars):
            continue  # Clients may evaluate without an instruction.
        sizes = strategy.instruction_sizes(members[name].info)
        if sizes in (done := checked.setdefault(id(knowledge), [])):
            continue
        done.append(sizes)
        try:
            strategy.spec.instructions.check(SERVER, knowledge.tensors, knowledge.scalars, sizes)
        except KnowledgeError as error:
            is_first = training and not strategy.state.rollback.formed
            causes = (type(strategy).init if is_first else type(strategy).aggregate, hook)
            own = [each for each in causes if each.__module__ != HetStrategy.__module__]
            fields = {field.name: field for field in strategy.spec.instructions.fields}
            field = fields.get(error.field.partition("/")[0])
            declared = f" ({field.name} = {field.describe()})" if field else ""
            raise InvalidInstructionError(
                f"method '{strategy.run.method}': the instruction for {name} in round {round} "
                f"violates MethodSpec.instructions{declared}: {error.reason}. Correct "
                f"{' or '.join(map(definition_of, own or causes))}."
            ) from None
