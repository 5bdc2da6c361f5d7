"""Flower server, and the strategy with which it runs the rounds of a method.

In a round, the strategy calls the method's `select` and `instruct`, and `Collector` calls the
clients, whose replies are decoded when they arrive. The strategy then checks the replies against
the contract, passes them through the steps of `fedhet.server.steps` (such as simulated attacks and
robust aggregation), and calls `accept` for each remaining reply. Finally, it calls `aggregate` and
evaluates the models.
"""

from __future__ import annotations

import contextlib
import copy
import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from flwr.common import EvaluateIns, FitIns, Parameters, Scalar
from flwr.server import History, Server
from flwr.server.client_manager import ClientManager

from fedhet.base.arrays import check_dtypes
from fedhet.base.errors import (
    FedhetError,
    InvalidInstructionError,
    KnowledgeError,
    StateError,
    definition_of,
    describe_error,
    error_location,
)
from fedhet.base.metrics import is_shown, measured_names
from fedhet.config.resolve import Config
from fedhet.data.store import RunData
from fedhet.learning.devices import compute_for
from fedhet.methods.registry import BASES, shipped_names
from fedhet.models import evaluate_model
from fedhet.runs.directory import parse_record, record_line
from fedhet.runs.log import RunLog
from fedhet.runs.measures import (
    EVALUATES_FIRST,
    Measured,
    by_score_key,
    count_tested,
    mean_metrics,
)
from fedhet.runs.records import Headline
from fedhet.runs.storage import OPEN, Checkpoint
from fedhet.server.calls import (
    LOG,
    NOTHING,
    CallOutcome,
    NamedProxy,
    RoundResults,
    UserCodeFault,
    UserCodeFaults,
    is_user_code_error,
)
from fedhet.server.codec import Codec, InstructionEncoder, without_versions
from fedhet.server.members import HELD_OUT_KINDS, ClientHealth, HeldOutClients, Member, Members
from fedhet.server.open_calls import OpenCalls
from fedhet.server.pace import Collector
from fedhet.server.reply import Reply, ReplySpool
from fedhet.server.round import OpenRound, RoundState, Selection, track_divergence
from fedhet.server.steps import steps_of
from fedhet.server.unmasking import Unmasking
from fedhet.wire.contract import Sizes
from fedhet.wire.encodings import Coder
from fedhet.wire.identity import SERVER, ClientInfo
from fedhet.wire.knowledge import Knowledge
from fedhet.wire.masking import MASKED_CONTRACT

if TYPE_CHECKING:
    from fedhet.strategies.base import HetStrategy

PACE = "pace"
"""Checkpoint metadata key for the calls in progress and the history of client selection."""
CALLS_PER_WORKER = 2
"""Concurrent calls per worker: one client trains, and the next client waits for the worker."""


class FederationServer(Server):
    """Flower server that can resume runs, and close rounds without waiting for all clients.

    As in Flower, a round consists of `configure_fit`, the clients' replies, and `aggregate_fit`,
    followed by the corresponding steps for the evaluation. In a deployment, each message takes
    seconds. There, if possible, clients evaluate a round in the message with which they train in
    the next round (`MethodStrategy.attach_evaluations`), with the same scores.
    """

    def __init__(
        self, config: Config, log: RunLog, manager: ClientManager, data: RunData | None = None
    ) -> None:
        super().__init__(client_manager=manager)
        self._strategy = MethodStrategy(config, log, data)
        self.set_max_workers(min(config.run.clients, CALLS_PER_WORKER * log.workers))
        self._log = log

    def fit(self, num_rounds: int, timeout: float | None) -> tuple[History, float]:
        """Run the remaining rounds, and write the summary.

        Returns:
            An empty history, because the run's directory contains the metrics, and the duration in
            seconds.

        Raises:
            FedhetError: If a custom method failed, or if the run has no result because no client
                replied or could be evaluated in the last rounds. The run's directory records the
                reason.
        """
        started = time.perf_counter()
        self._strategy.collector.open(self.max_workers or 1)
        with contextlib.closing(self._log):
            try:
                self._strategy.begin(self.client_manager())
                for number in range(self._log.done + 1, num_rounds + 1):
                    if number > self._log.last_round:
                        break
                    LOG.info("[ROUND %s]", number)
                    self._run_round(number, timeout)
                if fault := self._log.missing_result():
                    raise FedhetError(fault)
            except Exception as error:
                reported = self._reported(error)
                self._log.fail(reported)
                if reported is not error:
                    raise reported from error
                raise
            finally:
                self._strategy.collector.close()
            self._log.finish()
        return History(), time.perf_counter() - started

    def _run_round(self, number: int, timeout: float | None) -> None:
        """Run the training of a round, and its evaluation."""
        strategy = self._strategy
        collector, manager = strategy.collector, self.client_manager()
        instructions = strategy.configure_fit(number, manager)
        instructions, apart = strategy.attach_evaluations(instructions)
        evaluated = collector.evaluate(number - 1, apart, timeout) if apart else []
        results = RoundResults()
        is_training = bool(instructions or collector.clients_at_work)
        if is_training:
            results = collector.fit(number, instructions, strategy.state.needed, timeout)
        strategy.close_previous_round(evaluated, results)
        if is_training:
            strategy.aggregate_fit(number, results)
        if evaluations := strategy.configure_evaluate(number):
            strategy.aggregate_evaluate(collector.evaluate(number, evaluations, timeout))

    def _reported(self, error: Exception) -> Exception:
        """Return the error with which the run fails.

        An error in a custom method is converted to a StateError with a one-line message, and its
        traceback is written to the log.
        """
        method = self._log.config.method
        if isinstance(error, FedhetError) or method.name in shipped_names():
            return error
        fault = UserCodeFault.from_exception(error)
        LOG.error("%s", fault.traceback)
        in_file = (self._log.directory / "flower.log").exists()
        where = "The run's flower.log" if in_file else "The server's log"
        place = error_location(error, method.modules[0])
        reported = StateError(
            f"method '{method.name}' failed on the server: {describe_error(error)}{place}. "
            f"{where} contains the full traceback."
        )
        reported.add_note(fault.user_frames)
        return reported


class MethodStrategy:
    """Server side of a run, which calls the hooks of its method in each round."""

    def __init__(self, config: Config, log: RunLog, data: RunData | None = None) -> None:
        self.method: HetStrategy = config.method.strategy(config, log, data)
        self.log, method = log, self.method
        self._held_out = HeldOutClients(config.run, method.spec)
        self._code_faults = UserCodeFaults(log.notice, strict=config.run.engine.strict)
        self._members = Members.for_run(config, method.data, log.notice, self._code_faults)
        engine, pace, spec = config.run.engine, config.run.pace, method.spec
        limit = int(engine.max_payload_mb * 1e6)
        keep_all = pace.may_be_late and spec.late != "refused"
        calls = OpenCalls(log.directory, log.run_name, keep_all=keep_all)
        health = ClientHealth(engine.max_refusals, engine.max_silences, log.notice)
        self.state = RoundState(log.workers, log.notice, health, Headline.declared_by(spec), calls)
        # The codec encodes instructions and decodes replies. The spool stores weights on disk.
        self._codec = Codec(
            log.run_name,
            config.method,
            limit,
            self.state,
            config.run.metrics,
            max_age=pace.max_age,
            encoder=InstructionEncoder(
                Coder.for_contract(config.run.wire, spec.instructions, config.run.seed)
            ),
            per_target=method.task.outputs(1),
        )
        replies, self._unmasking = spec.replies, None
        if config.run.privacy.secure_aggregation:
            replies = MASKED_CONTRACT
            self._unmasking = Unmasking(
                config, log.run_name, self.state, log.directory, engine.join_timeout
            )
        self._spool = ReplySpool(log.directory / "inbox", replies)
        self._used_spool = self._spool if spec.large_messages or replies.weights else None
        # Limit the number of large instructions that exist at the same time.
        self._turn = threading.BoundedSemaphore(engine.in_flight or log.workers)
        self.collector = Collector(config.run, self._codec, calls, self._used_spool)
        # Selection by scores needs all scores, late replies need all rounds to be closed, and
        # encoded weights need messages of one kind.
        self._attaches_evaluations = log.is_deployed and not (
            method.run.early_stopping
            or method.run.keep_best
            or pace.may_be_late
            or spec.large_messages
            or config.run.privacy.secure_aggregation
            or config.run.wire.encoding != "float32"
        )
        """Whether an evaluation can be part of the next round's messages."""
        self._open: OpenRound | None = None
        """Previous round, if its evaluation is part of this round's messages."""
        self._instruct_error: Exception | None = None
        """Error in the creation of a large instruction, which occurred in another thread."""

    # Methods in the order of a round.

    def begin(self, client_manager: ClientManager) -> None:
        """Wait for clients, read their descriptions, and initialize the method."""
        method = self.method
        self.log.waiting(f"waiting for {method.run.clients} clients to load data and build models")
        self._spool.clear()  # An earlier process may have left replies on disk.
        if not self.log.resumed:
            self.state.calls.load_dict({}, is_simulated=False)
        all_members = self._members.wait_for_first(
            client_manager, method.run.clients, method.run.engine
        )
        method.members = self._held_out.split_off(all_members)
        infos = [member.info for member in all_members.values()]
        # If the server can read the names of classes or targets, the names label their metrics.
        class_names: Sequence[str] = ()
        num_labels = infos[0].classes // method.task.outputs(1)
        has_labels = not all(map(is_shown, measured_names(method.run.metrics, num_labels)))
        if has_labels and not any(info.own_data for info in infos):
            with contextlib.suppress(FedhetError):
                class_names = method.data.dataset.format.classes
        # Sites evaluate only on their own samples; the server evaluates its models.
        evaluates = type(method).eval_models.__module__ != BASES["HetStrategy"]
        has_common_test = method.common_test() is not None and (
            evaluates or not any(info.own_data for info in infos)
        )
        self.log.begin(infos, class_names, has_common_test=has_common_test)
        method.write_record(infos)
        if self._unmasking:
            self._unmasking.check(infos)
        if self._held_out.notice:
            self.log.notice(self._held_out.notice)
        self.state.scores.mark_outdated(method.members)
        method.spec.check_model(method.settings, method.reference_client)
        # Use as many threads as the clients, because the number of threads affects floating-point
        # sums.
        torch.set_num_threads(method.run.engine.threads)
        method.init()
        if self.log.resumed:
            self._resume(self.log.resumed)

    def configure_fit(
        self, server_round: int, client_manager: ClientManager
    ) -> list[tuple[NamedProxy, FitIns]]:
        """Select the clients of a round, and return an instruction for each client."""
        method = self.method
        self.state.start(server_round)
        method.run = self.log.with_last_round(method.run)
        # Wait for enough clients for a sum; otherwise, all remaining rounds would pass within
        # seconds.
        needed = self._unmasking.min_clients if self._unmasking else 0
        present = self._held_out.split_off(self._members.wait_for(client_manager, needed))
        method.members = present or method.members
        self.log.clients_joined(member.info for member in method.members.values())
        absent = self.log.models.keys() - method.members.keys() - self._held_out.names
        self.state.scores.mark_outdated(self._held_out.names)
        health = self.state.health
        eligible = health.eligible(server_round, method.members)
        if len(eligible) < needed:
            reason = partial(health.exclusion_reason, server_round)
            eligible = [name for name in method.members if reason(name) != "excluded"]
        at_work = self.collector.clients_at_work
        idle = [method.members[name].info for name in eligible if name not in at_work]
        method.sampler.start(len(eligible) - len(idle))
        selection = method.select(server_round, idle) if idle else Selection(())
        if self._unmasking:
            summed = self._unmasking.start(server_round, method.members, selection.training)
            selection = Selection(tuple(name for name in selection.training if name in summed))
        self.state.record_selection(selection, method.sampler.needed(selection), at_work, absent)
        self.log.round_started(
            server_round, selection.names, self.state.exclusion_reasons(method.members)
        )
        evaluating: tuple[str, ...] = ()
        if self._is_evaluated(server_round) and not method.evaluates_after(server_round):
            evaluating = selection.training
        selected = [method.members[name] for name in selection.names]
        calls: list[tuple[NamedProxy, FitIns]] = []
        if not method.spec.large_messages:
            instructions = {m.info.name: method.instruct(server_round, m.info) for m in selected}
            check_instructions(method, self.state, server_round, instructions, method.members)
            payloads = self._codec.encode_all(server_round, instructions)
        for member in selected:
            name = member.info.name
            config: dict[str, Scalar] = {
                "evaluate": name in evaluating,
                **self.log.best_round_config,
                **(self._unmasking.config(name) if self._unmasking else {}),
            }
            if method.spec.large_messages:
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
            instructions = {client.name: self.method.instruct(round, client)}
            members = self.method.members
            check_instructions(self.method, self.state, round, instructions, members)
        except Exception as error:
            if is_user_code_error(error) or isinstance(error, InvalidInstructionError):
                self._instruct_error = error  # Do not count it as the client's failure.
            raise
        return self._codec.encode_all(round, instructions, differences=False)[client.name]

    def _proxy(self, member: Member, **options: Any) -> NamedProxy:
        """Return the recipient of a message to a member."""
        name, method = member.info.name, self.method
        kinds = HELD_OUT_KINDS if name in self._held_out.names else method.spec.kinds
        return NamedProxy(
            name,
            member.proxy,
            partial(self._codec.read, member.info, kinds),
            on_reply=self.log.client_answered,
            message_without_base=partial(self._codec.message_without_base, name),
            spool=self._used_spool,
            **options,
        )

    def aggregate_fit(self, server_round: int, results: RoundResults) -> None:
        """Check the replies of a round, and aggregate the replies that the method accepts."""
        method = self.method
        self.state.record_results(results, quiet=method.run.pace.is_simulated)
        method.sampler.record_durations(results.seconds)
        self.state.clock.stop_waiting()
        if self._instruct_error is not None:
            raise self._instruct_error
        self._code_faults.report(outcome.code_fault for outcome in results.outcomes)
        torch.set_num_threads(method.run.engine.threads)  # Another thread may have changed it.
        with self._spool.open_replies():
            trained = {*self.state.selection.training, *self.state.calls.late_rounds}
            self.state.scores.mark_outdated(trained & {*self.state.expected})
            replies: Iterable[Reply] = self._codec.replies(results.outcomes, method.members)
            instruct = partial(method.instruct, server_round)
            run, spec, sizes, members = method.run, method.spec, method.sizes, method.members
            steps = steps_of(run, spec, sizes, self.state, members, instruct, self._unmasking)
            for step in (*steps, self._accept):
                replies = step(replies)
            accepted = list(replies)
            names = {name for reply in accepted for name in reply.clients or (reply.client.name,)}
            sums = [reply.client.name for reply in accepted if reply.clients]
            if self.state.finalize(sorted(names), sums):
                # Restore the last state from which the clients received usable instructions.
                good = self.state.rollback.good
                tensors = self.log.checkpoints.read_checkpoint(good).tensors if good else {}
                method.init()
                if good:
                    method.load_state_dict(without_versions(tensors))
                self.state.record_rollback()
            elif accepted:
                with track_divergence(self.state, method.run):
                    metrics = method.aggregate(server_round, accepted)
                    if not isinstance(metrics, Mapping):
                        raise TypeError(f"aggregate must return a mapping, got {metrics!r:.100}")
                    self.state.add_metrics(metrics, declared=method.spec.metrics)
                    self.state.add_metrics(mean_metrics([r.measured.metrics for r in accepted]))

    def _accept(self, replies: Iterable[Reply]) -> Iterator[Reply]:
        """Yield the replies that the method accepts."""
        method = self.method
        for reply in replies:
            with self.state.drop_on_error(reply.client.name):
                declared = reply.knowledge.declaring(method.spec.replies)
                reply = replace(reply, knowledge=declared)
                accepted = method.accept(self.state.record.round, reply)
                if not reply.clients:  # The clients of a sum were recorded earlier.
                    self.state.record_measured(reply.client.name, reply.measured)
                method.sampler.record_reply(reply, self.state.record.round)
                yield accepted

    def configure_evaluate(self, server_round: int) -> list[tuple[NamedProxy, EvaluateIns]]:
        """Return an instruction for each client that evaluates after the round."""
        evaluations = self._evaluations(server_round)
        if not evaluations:
            self._finish_round()
            return []
        if self._attaches_evaluations and self.log.last_round > server_round:
            self._finish_round(evaluations)
            return []
        self.state.clock.start_waiting()
        members = self.method.members | self._held_out.members
        return [(self._proxy(members[name]), ins) for name, ins in evaluations.items()]

    def _evaluations(self, server_round: int) -> dict[str, EvaluateIns]:
        """Return the instructions of the clients that evaluate after the round."""
        method = self.method
        instructions: dict[str, Knowledge] = {}
        if self._is_evaluated(server_round):  # Exclude clients that failed in this round.
            idle = method.members.keys() - self.collector.clients_at_work
            for name in self.state.reachable(idle):
                knowledge = method.eval_instruction(server_round, method.members[name].info)
                if knowledge is not None or self.state.scores.is_outdated(name):
                    instructions[name] = knowledge or Knowledge()
            if server_round == method.run.rounds:
                offer = partial(method.eval_instruction, server_round)
                instructions |= self._held_out.instructions(offer)
        all_members = method.members | self._held_out.members
        held_out = self._held_out.names
        check_instructions(
            method, self.state, server_round, instructions, all_members, training=False
        )
        payloads = self._codec.encode_all(server_round, instructions, training=False)
        return {
            name: EvaluateIns(payload, {"unseen": True} if name in held_out else {})
            for name, payload in payloads.items()
        }

    def aggregate_evaluate(self, outcomes: Sequence[CallOutcome]) -> None:
        """Record the clients' evaluations and close the round."""
        self.state.clock.stop_waiting()
        self._code_faults.report(outcome.code_fault for outcome in outcomes)
        for outcome in sorted(outcomes, key=lambda outcome: outcome.client):
            self.state.record_evaluation(outcome)
        self._finish_round()

    # Methods for a round whose evaluation is part of the next round's messages.

    def attach_evaluations(
        self, calls: Sequence[tuple[NamedProxy, FitIns]]
    ) -> tuple[list[tuple[NamedProxy, FitIns]], list[tuple[NamedProxy, EvaluateIns]]]:
        """Attach the previous round's evaluations to the instructions to train.

        Args:
            calls: The clients that train, and their instructions.

        Returns:
            The calls with evaluations, and calls to clients that evaluate but do not train.
        """
        apart = dict(self._open.evaluations) if self._open else {}
        attached = []
        for proxy, message in calls:
            if evaluation := apart.pop(proxy.name, None):
                first = evaluation.parameters.tensors
                tensors = [*first, *message.parameters.tensors]
                config = {**message.config, EVALUATES_FIRST: len(first)}
                message = FitIns(replace(message.parameters, tensors=tensors), config)
            attached.append((proxy, message))
        members = self.method.members
        separate = [(self._proxy(members[n]), ins) for n, ins in apart.items() if n in members]
        return attached, separate

    def close_previous_round(self, evaluated: Sequence[CallOutcome], results: RoundResults) -> None:
        """Record the evaluations of the previous round, unless it has been closed.

        Args:
            evaluated: Outcomes of the evaluations by clients that do not train in this round.
            results: Outcomes of the training, which contain the attached evaluations.
        """
        if self._open is None:
            return
        outcomes = {outcome.client: outcome for outcome in evaluated}
        for outcome in results.outcomes:
            if outcome.client in self._open.evaluations:
                outcomes[outcome.client] = outcome.evaluation or replace(
                    outcome, error=outcome.error or "sent no evaluation"
                )
        for name in sorted(self._open.evaluations):
            reason = "did not reply in time" if name in self.method.members else "has left"
            missing = CallOutcome(name, self._open.record.round, error=reason)
            self.state.record_evaluation(outcomes.get(name, missing), self._open.record)
        self.state.scores.write_to(self._open.record)
        self.log.round_finished(self._open.record)
        self._open = None

    # Private helpers.

    def _resume(self, checkpoint: Checkpoint) -> None:
        """Restore the checkpoint of the last complete round.

        Raises StateError if it does not match the method.
        """
        method = self.method
        try:
            self.state.load_json(str(checkpoint.metadata["state"]))
            pace = json.loads(str(checkpoint.metadata[PACE]))
            self.collector.load_dict(pace["collector"])
            method.sampler.load_dict(pace["selection"])
            tensors = self._codec.encoder.load(checkpoint.tensors, checkpoint.metadata)
            check_dtypes(tensors, method.state_dict())
            method.load_state_dict(tensors)
            if OPEN in checkpoint.metadata:
                line = str(checkpoint.metadata[OPEN])
                record = parse_record(line, f"record of round {checkpoint.round}")
                # The record already contains the bytes of these instructions.
                self.state.record = copy.deepcopy(record)
                self._open = OpenRound(record, self._evaluations(record.round))
        except (LookupError, ValueError, TypeError, RuntimeError, AttributeError) as error:
            raise StateError(
                f"the checkpoint of round {checkpoint.round} in {self.log.directory} does not "
                f"match the method {method.run.method}: {error!r}"
            ) from error

    def _is_evaluated(self, round: int) -> bool:
        run = self.method.run
        is_due = round % run.evaluate_every == 0 and round >= run.evaluate_from
        return is_due or round == run.rounds

    def _finish_round(self, evaluations: dict[str, EvaluateIns] | None = None) -> None:
        """Finish the current round. With `evaluations`, the round stays open for their outcomes."""
        method = self.method
        evaluated = self._is_evaluated(self.state.record.round)
        models = method.eval_models() if evaluated else {}
        if models and (common := method.common_test()) is not None:
            compute, task = compute_for(method.run.engine), method.data.dataset.format.task
            scores = {
                ("common", kind): evaluate_model(model, common, compute, method.run.metrics, task)
                for kind, model in models.items()
            }
            measured = Measured(by_score_key(scores), tested=count_tested(scores))
            self.log.server_confusion = {kind: s.confusion for (_, kind), s in scores.items()}
            self.state.record_measured(SERVER, measured)
        for name in self.state.update_health(method.members):
            method.forget(name)
        method.sampler.finish()
        record = self.state.finish(evaluated=evaluated and not evaluations)
        metadata = {}
        if evaluations:
            # No second checkpoint follows, so a resumed run evaluates this round again.
            self._open = OpenRound(record, evaluations)
            metadata[OPEN] = record_line(record)
        else:
            self.log.round_finished(record)
        pace = {"collector": self.collector.to_dict(), "selection": method.sampler.to_dict()}
        metadata |= {
            "state": self.state.to_json(),
            PACE: json.dumps(pace),
            **self._codec.encoder.metadata(),
        }
        tensors = {**method.state_dict(), **self._codec.encoder.state_dict()}
        kept = {self.state.rollback.good, self.log.best_round}
        self.log.checkpoints.write_checkpoint(record.round, tensors, metadata, kept)
        self.state.calls.remove_used()


def check_instructions(
    method: HetStrategy,
    state: RoundState,
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
    hook = type(method).instruct if training else type(method).eval_instruction
    for name, knowledge in instructions.items():
        if not isinstance(knowledge, Knowledge):
            raise TypeError(f"{hook.__name__} must return Knowledge, got {knowledge!r:.100}")
        if not (training or knowledge.tensors or knowledge.scalars):
            continue  # Clients may evaluate without an instruction.
        sizes = method.instruction_sizes(members[name].info)
        if sizes in (done := checked.setdefault(id(knowledge), [])):
            continue
        done.append(sizes)
        try:
            method.spec.instructions.check(SERVER, knowledge.tensors, knowledge.scalars, sizes)
        except KnowledgeError as error:
            is_first = training and not state.rollback.formed
            causes = (type(method).init if is_first else type(method).aggregate, hook)
            own = [each for each in causes if each.__module__ != BASES["HetStrategy"]]
            fields = {field.name: field for field in method.spec.instructions.fields}
            field = fields.get(error.field.partition("/")[0])
            declared = f" ({field.name} = {field.describe()})" if field else ""
            raise InvalidInstructionError(
                f"method '{method.run.method}': the instruction for {name} in round {round} "
                f"violates MethodSpec.instructions{declared}: {error.reason}. Correct "
                f"{' or '.join(map(definition_of, own or causes))}."
            ) from None
