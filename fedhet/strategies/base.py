"""The server half of every method: a Flower strategy that calls the hooks a method implements.

A round is, in this file's order: `select`, `instruct`, the steps that each reply passes (decoding,
contract, attack if there is one, magnitude, robust average, `accept`), `aggregate`, and then the
evaluation.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from flwr.common import EvaluateIns, EvaluateRes, FitIns, FitRes, Parameters, Scalar
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import Strategy
from torch import nn

from fedhet.base.arrays import Array, refuse_other_types
from fedhet.base.errors import FedhetError, StateError
from fedhet.config.resolve import Config
from fedhet.data.spec import Split
from fedhet.data.store import RunData
from fedhet.learning.devices import compute_for
from fedhet.methods.spec import MethodSpec
from fedhet.models import HetModel, build, judge
from fedhet.runs.log import RunLog
from fedhet.runs.measures import Measured, mean_metrics, placed
from fedhet.runs.storage import Checkpoint
from fedhet.server.calls import NOTHING, Failures, NamedProxy, UserCodeFaults, name_of, reasons
from fedhet.server.codec import Codec, InstructionEncoder, without_versions
from fedhet.server.members import (
    HELD_OUT_KINDS,
    ClientHealth,
    HeldOutClients,
    Member,
    Members,
    first_of_pool,
)
from fedhet.server.pace import Collector, RoundResults
from fedhet.server.reply import LateReplies, Reply, ReplySpool
from fedhet.server.round import RoundState, Selection, learning
from fedhet.server.selection import ClientSampler
from fedhet.server.steps import checks, through
from fedhet.wire.contract import Sizes
from fedhet.wire.encodings import Coder
from fedhet.wire.identity import SERVER, ClientInfo
from fedhet.wire.knowledge import Knowledge

__all__ = ["HetStrategy", "Reply", "Selection"]

PACE = "pace"
"""The metadata of a checkpoint on calls in progress and on the history of client selection."""


class HetStrategy(Strategy):
    """Base class of a method's server half: set `spec`, implement the hooks."""

    spec: ClassVar[MethodSpec]
    instruction = Knowledge()
    """The instruction of all clients, for a method that sends all the same."""

    def __init__(self, config: Config, log: RunLog, data: RunData | None = None) -> None:
        # Of training settings that are assigned to the clients, the server has the first.
        config = config.replacing(training=config.run.training.first())
        self.run, self.settings, self.log = config.run, config.own, log
        self.data = data or RunData.of(config.run)
        self.members: dict[str, Member] = {}
        self._held_out = HeldOutClients(self.run, self.spec)
        self._code_faults = UserCodeFaults(log.notice, strict=self.run.engine.strict)
        self._members = Members.of(config, self.data, log.notice, self._code_faults)
        engine, pace, spec = self.run.engine, self.run.pace, self.spec
        health = ClientHealth(engine.max_refusals, engine.max_silences, log.notice)
        self.state = RoundState(log.workers, log.notice, health)
        # Messages to clients, and their replies.
        limit = int(engine.max_payload_mb * 1e6)
        self._codec = Codec(
            *(log.run_name, config.method, limit, self.state, self.run.metrics),
            remember=pace.may_be_late and spec.late != "refused",
            max_age=pace.max_age,
            encoder=InstructionEncoder(Coder.of(self.run.wire, spec.instructions, self.run.seed)),
        )
        self._spool = ReplySpool(log.directory / "inbox", limit, spec.replies, self._codec.bases_of)
        self._used_spool = self._spool if spec.large_messages or spec.replies.weights else None
        # Large instructions are made just before they are sent, a few at a time.
        self._turn = threading.BoundedSemaphore(engine.in_flight or log.workers)
        self._late = LateReplies(log.directory, log.run_name)
        self.collector = Collector(self.run, self._codec, self._late, self._used_spool)
        self._sampler = ClientSampler(self.run)

    # The hooks: what a method implements.

    def init(self) -> None:
        """Initialize the server's state; `self.members` is already set."""

    def select(self, round: int, members: Sequence[ClientInfo]) -> Selection:
        """Select the round's clients: by default a share `fraction`, at least one.

        `members` leaves out those that are still at work. `[pace]` says how clients are chosen.
        """
        return Selection(tuple(self._sampler.choose(round, members)))

    def instruct(self, round: int, client: ClientInfo) -> Knowledge:
        """Return the instruction for `client`: by default the one that all clients share.

        An object that several clients share is encoded once. With `spec.large_messages`, another
        thread calls this just before the client is sent it.
        """
        return self.instruction

    def accept(self, round: int, reply: Reply) -> Reply:
        """Return the part of a reply that `aggregate` needs; store large parts elsewhere.

        Weights lie on disk until `aggregate` returns, and are read each time they are used: a
        method that keeps some copies them, by `numpy.array`. Raises KnowledgeError to refuse a
        reply although it satisfies the contract.
        """
        return reply

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Aggregate the replies, sorted by client; return the method's own metrics of the round.

        Raises DivergedError if the server's own training diverged, with its models as they were.
        """
        raise NotImplementedError

    def forget(self, client: str) -> None:
        """Drop what a client has contributed: it left, fails again and again, or is excluded."""

    def eval_instruction(self, round: int, client: ClientInfo) -> Knowledge | None:
        """Return the instruction that `client` needs to evaluate its models after `round`.

        So every client evaluates the server's models as they are then. With `spec.learns_last` it
        first trains on the instruction of the last round.

        None: the client is asked only if its models have changed, with an empty instruction.
        """
        return None

    def eval_models(self) -> Mapping[str, nn.Module]:
        """Return the server's own models to evaluate, by kind."""
        return {}

    def state_dict(self) -> dict[str, Array]:
        """Return the state that the method keeps across rounds, by name, for the checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore what `state_dict` returned at the end of a round; `init` has been called."""

    def sizes(self, client: ClientInfo) -> Sizes:
        """Return the sizes that the fields of the client's replies must have."""
        return self.spec.sizes(self.settings, client)

    def evaluates_after(self, round: int) -> bool:
        """Return whether clients that train evaluate after `aggregate`, not when they have trained.

        By default they do if the method sends them something to evaluate.
        """
        return type(self).eval_instruction is not HetStrategy.eval_instruction

    # Helpers for methods.

    @property
    def task(self) -> ClientInfo:
        """Return the client that defines the task (shape and classes)."""
        return first_of_pool(self.members.values(), self.run.models.pool)

    def build_model(self, name: str = "", feature_dim: int | None = None) -> HetModel:
        """Return a new network for the task: of `name`, by default of the task's architecture."""
        task, seed = self.task, self.run.seed
        return build(
            name or task.model,
            task.shape,
            task.classes,
            kind=task.kind,
            seed=seed,
            feature_dim=feature_dim,
        )

    def public_set(self, *, labeled: bool) -> Split:
        """Return the public set, scaled; set `labeled` if the method uses its labels."""
        classes = self.task.classes if labeled else None
        return self.data.public_set(self.task.kind, self.task.shape, classes)

    def common_test(self) -> Split | None:
        """Return the common test set, scaled, or None if there is none for the clients' task."""
        return self.data.common_test_of(self.task.kind, self.task.shape)

    # Flower's interface, in the order of a round.

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters:
        """Wait for the clients, collect their descriptions, and initialize the method."""
        self.log.waiting(f"waiting for {self.run.clients} clients to load data and build models")
        self._spool.clear()  # of what an earlier process has left
        if not self.log.resumed:
            self._late.restore({})
        every = self._members.first(client_manager, self.run.clients, self.run.engine)
        self.members = self._held_out.without(every)
        infos = [member.info for member in every.values()]
        class_names: Sequence[str] = ()  # for metrics by class, unless the server cannot read them
        if "recall" in self.run.metrics and not any(info.own_data for info in infos):
            with contextlib.suppress(FedhetError):
                class_names = self.data.dataset.classes
        self.log.begin(infos, class_names)
        if self._held_out.notice:
            self.log.notice(self._held_out.notice)
        self.state.scores.outdate(self.members)
        self.spec.check_model(self.settings, self.task)
        # The thread count affects floating-point sums: fix it, as on the clients.
        torch.set_num_threads(self.run.engine.threads)
        self.init()
        if self.log.resumed:
            self._resume(self.log.resumed)
        return NOTHING

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Select clients and return an instruction for each."""
        self.state.start(server_round)
        self.run = self.log.ending(self.run)
        present = self._held_out.without(self._members.present(client_manager))
        self.members = present or self.members
        self.log.joined(member.info for member in self.members.values())
        absent = self.log.models.keys() - self.members.keys() - self._held_out.names
        self.state.record.absent = sorted(absent)
        self.state.scores.outdate(self._held_out.names)
        eligible = self.state.health.eligible(server_round, self.members)
        busy = self.collector.busy
        idle = [self.members[name].info for name in eligible if name not in busy]
        self._sampler.start(len(eligible) - len(idle))
        selection = self.select(server_round, idle) if idle else Selection(())
        self.state.ask(selection, self._sampler.needed(selection), busy)
        self.log.round_started(
            server_round, selection.names, self.state.exclusion_reasons(self.members)
        )
        at_once = self._evaluates(server_round) and not self.evaluates_after(server_round)
        evaluated = selection.training if at_once else ()
        asked = [self.members[name] for name in selection.names]
        instructions: list[tuple[ClientProxy, FitIns]] = []
        if not self.spec.large_messages:
            made = {each.info.name: self.instruct(server_round, each.info) for each in asked}
            payloads = self._codec.encode_all(server_round, made)
        for member in asked:
            name = member.info.name
            config: dict[str, Scalar] = {"evaluate": name in evaluated, **self.log.kept_too}
            if self.spec.large_messages:
                make = partial(self._encoded, server_round, member.info)
                proxy = self._proxy_of(member, instruction=make, turn=self._turn)
                instructions.append((proxy, FitIns(NOTHING, config)))
            else:
                instructions.append((self._proxy_of(member), FitIns(payloads[name], config)))
        self.state.clock.wait()
        return instructions

    def _encoded(self, round: int, client: ClientInfo) -> Parameters:
        """Return the payload of a large instruction, just before it is sent."""
        return self._codec.encode(round, client.name, self.instruct(round, client))

    def _proxy_of(self, member: Member, **large: Any) -> NamedProxy:
        """Return the recipient of a message to a member."""
        name = member.info.name
        return NamedProxy(
            name,
            member.proxy,
            on_reply=self.log.client_answered,
            whole=partial(self._codec.without_base, name),
            spool=self._used_spool,
            **large,
        )

    def close_round(self, found: RoundResults) -> None:
        """Take over which clients a round has got when it closed, and tell who is late."""
        simulated = self.run.pace.is_simulated
        self.state.closed(found.late, found.arrived, found.withdrawn, found.clock, quiet=simulated)
        self._sampler.seconds = found.seconds

    def aggregate_fit(
        self, server_round: int, results: list[tuple[ClientProxy, FitRes]], failures: Failures
    ) -> tuple[Parameters, dict[str, Scalar]]:
        """Let the replies pass their steps, and the method aggregate those that are accepted."""
        self.state.clock.replied()
        self._code_faults.enter(failures)
        torch.set_num_threads(self.run.engine.threads)  # whoever has changed it meanwhile
        with self._spool.read():
            trained = {*self.state.selection.training, *self.state.arrived}
            self.state.scores.outdate(trained & {*self.state.expected})
            replies = self._codec.decode_all(results, failures, self.members)
            now = partial(self.instruct, server_round)
            steps = checks(self.run, self.spec, self.sizes, self.state, self.members, now)
            accepted = list(through([*steps, self._accepted], replies))
            if self.state.finalize([reply.client.name for reply in accepted]):
                # The state after the last round whose instructions the clients could use.
                good = self.state.rollback.good
                kept = self.log.checkpoints.read(good).tensors if good else {}
                self.init()
                if good:
                    self.load_state_dict(without_versions(kept))
                self.state.rolled_back()
            elif accepted:
                with learning(self.state, self.run):
                    self.state.add_metrics(self.aggregate(server_round, accepted))
                    self.state.add_metrics(mean_metrics([r.measured.metrics for r in accepted]))
        return NOTHING, dict(self.state.record.method)

    def _accepted(self, replies: Iterable[Reply]) -> Iterator[Reply]:
        """Yield what the method accepts of the replies: their last step."""
        for reply in replies:
            with self.state.dropping(reply.client.name):
                accepted = self.accept(self.state.record.round, reply)
                self.state.measured(reply.client.name, reply.measured)
                self._sampler.record_reply(reply, self.state.record.round)
                yield accepted

    def evaluate(self, server_round: int, parameters: Parameters) -> None:
        """Do nothing: the server's own models are evaluated when the round closes."""
        return

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        """Ask clients to evaluate if their models have changed since their last evaluation."""
        instructions: dict[str, Knowledge] = {}
        if self._evaluates(server_round):  # of clients that are due and have not failed
            for name in self.state.present(self.members.keys() - self.collector.busy):
                knowledge = self.eval_instruction(server_round, self.members[name].info)
                if knowledge is not None or self.state.scores.is_outdated(name):
                    instructions[name] = knowledge or Knowledge()
            if server_round == self.run.rounds:
                offer = partial(self.eval_instruction, server_round)
                instructions |= self._held_out.instructions(offer)
        if not instructions:
            self._finish_round()
            return []
        payloads = self._codec.encode_all(server_round, instructions, training=False)
        every, unseen = self._held_out.added_to(self.members), self._held_out.names
        asked: list[tuple[ClientProxy, EvaluateIns]] = [
            (
                self._proxy_of(every[name]),
                EvaluateIns(payload, {"unseen": True} if name in unseen else {}),
            )
            for name, payload in payloads.items()
        ]
        self.state.clock.wait()
        return asked

    def aggregate_evaluate(
        self, server_round: int, results: list[tuple[ClientProxy, EvaluateRes]], failures: Failures
    ) -> tuple[float | None, dict[str, Scalar]]:
        """Record the accuracies and close the round."""
        self.state.clock.replied()
        self._code_faults.enter(failures)
        for name, reason in sorted(reasons(failures).items()):
            self.state.not_evaluated(name, reason, "silent")
        everyone = self._held_out.added_to(self.members)
        arrived = {name_of(proxy): result for proxy, result in results}
        for name, result in sorted(arrived.items()):
            with self.state.not_evaluating(name):
                unseen, info = name in self._held_out.names, everyone[name].info
                kinds = HELD_OUT_KINDS if unseen else self.spec.kinds
                self.state.measured(name, self._codec.decode_evaluation(info, result, kinds))
        self._finish_round()
        return None, {}

    # What these methods call.

    def _resume(self, checkpoint: Checkpoint) -> None:
        """Resume after the last complete round. Raises StateError."""
        try:
            self.state.load_json(str(checkpoint.metadata["state"]))
            pace = json.loads(str(checkpoint.metadata[PACE]))
            self.collector.load_dict(pace["collector"])
            self._sampler.load_dict(pace["selection"])
            own = self._codec.encoder.load(checkpoint.tensors, checkpoint.metadata)
            refuse_other_types(own, self.state_dict())
            self.load_state_dict(own)
        except (LookupError, ValueError, TypeError, RuntimeError, AttributeError) as error:
            raise StateError(
                f"the checkpoint of round {checkpoint.round} in {self.log.directory} does not fit "
                f"the method {self.run.method}: {error!r}"
            ) from error

    def _evaluates(self, round: int) -> bool:
        due = round % self.run.evaluate_every == 0 and round >= self.run.evaluate_from
        return due or round == self.run.rounds

    def _finish_round(self) -> None:
        evaluated = self._evaluates(self.state.record.round)
        models = self.eval_models() if evaluated else {}
        if models and (common := self.common_test()) is not None:
            compute = compute_for(self.run.engine)
            scores = {
                ("common", kind): judge(model, common, compute, self.run.metrics)
                for kind, model in models.items()
            }
            self.state.measured(SERVER, Measured(placed(scores)))
        for name in self.state.enter_health(self.members):
            self.forget(name)
        self._sampler.finish()
        record = self.state.close(evaluated=evaluated)
        self.log.round_finished(record)
        pace = {"collector": self.collector.to_dict(), "selection": self._sampler.to_dict()}
        metadata = {
            "state": self.state.to_json(),
            PACE: json.dumps(pace),
            **self._codec.encoder.metadata(),
        }
        tensors = {**self.state_dict(), **self._codec.encoder.state_dict()}
        self.log.checkpoints.write(record.round, tensors, metadata, self.state.rollback.good)
        self.collector.settled(self.state.arrived)
