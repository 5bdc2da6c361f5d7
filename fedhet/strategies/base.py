"""The server half of every method: a Flower strategy that calls the hooks a method implements.

A round is, in this file's order: `select`, `instruct`, the steps that each reply passes (decoding,
contract, attack if there is one, magnitude, robust average, `accept`), `aggregate`, and then the
evaluation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar

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
from fedhet.models.evaluation import judge
from fedhet.runs.log import RunLog
from fedhet.runs.measures import Measured, mean_figures, placed
from fedhet.runs.storage import Checkpoint
from fedhet.server.calls import Failures, name_of, reasons
from fedhet.server.client_health import ClientHealth, CodeFaults
from fedhet.server.dispatch import NOTHING
from fedhet.server.members import HeldBack, Member, Members, first_of_pool
from fedhet.server.messaging import Messaging
from fedhet.server.pace import Collected
from fedhet.server.published import without_versions
from fedhet.server.reply import Reply
from fedhet.server.round import RoundState, Selection, learning
from fedhet.server.steps import carried_over_by, checks, through
from fedhet.wire.contract import Sizes
from fedhet.wire.identity import SERVER, ClientInfo
from fedhet.wire.knowledge import Knowledge

__all__ = ["HetStrategy", "Reply", "Selection"]


class HetStrategy(Strategy):
    """Base class of a method's server half: set `spec`, implement the hooks."""

    spec: ClassVar[MethodSpec]

    def __init__(self, config: Config, log: RunLog, data: RunData | None = None) -> None:
        # Of training settings that are assigned to the clients, the server has the first.
        config = config.replacing(training=config.run.training.first())
        self.run, self.settings, self.log = config.run, config.own, log
        self.data = data or RunData.of(config.run)
        self.members: dict[str, Member] = {}
        self._held_back = HeldBack(self.run, self.spec)
        self._code_faults = CodeFaults(log.notice, strict=self.run.engine.strict)
        self._members = Members.of(config, self.data, log.notice, self._code_faults)
        engine = self.run.engine
        health = ClientHealth(engine.refusals, engine.silences, log.notice)
        self.state = RoundState(log.workers, log.notice, health)
        self._messages = Messaging.of(config, self.spec, log, self.state)
        self.collector = self._messages.collector

    # The hooks: what a method implements.

    def init(self) -> None:
        """Initialise the server's state; `self.members` is already set."""

    def select(self, round: int, members: Sequence[ClientInfo]) -> Selection:
        """Select the round's clients: by default a share `fraction`, at least one.

        `members` leaves out those that are still at work. `[pace]` says how clients are chosen.
        """
        return Selection(tuple(self._messages.selecting.choose(round, members)))

    def instruct(self, round: int, client: ClientInfo) -> Knowledge:
        """Return the instruction for `client`; an object shared by several clients is encoded once.

        With `spec.large_messages`, another thread calls this just before the client is sent it.
        """
        raise NotImplementedError

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

    def public_set(self, *, labelled: bool) -> Split:
        """Return the public set, scaled; set `labelled` if the method uses its labels."""
        classes = self.task.classes if labelled else None
        return self.data.public_set(self.task.kind, self.task.shape, classes)

    def common_test(self) -> Split | None:
        """Return the common test set, scaled, or None if there is none for the clients' task."""
        return self.data.common_test_of(self.task.shape)

    # Flower's interface, in the order of a round.

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters:
        """Wait for the clients, collect their descriptions, and initialise the method."""
        self.log.waiting(f"waiting for {self.run.clients} clients to load data and build models")
        self._messages.clear(resumed=bool(self.log.resumed))
        every = self._members.first(client_manager, self.run.clients, self.run.engine)
        self.members = self._held_back.taken_from(every)
        infos = [member.info for member in every.values()]
        self.log.begin(infos, self._class_names(infos))
        self._held_back.tell(self.log.notice)
        self.state.scores.outdate(self.members)
        self.spec.suits(self.settings, self.task)
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
        present = self._held_back.taken_from(self._members.present(client_manager))
        self.members = present or self.members
        self.log.joined(member.info for member in self.members.values())
        self.state.missing(self.log.models.keys() - self.members.keys() - self._held_back.names)
        self.state.scores.outdate(self._held_back.names)
        eligible = self.state.health.eligible(server_round, self.members)
        busy = self.collector.busy
        idle = [self.members[name].info for name in eligible if name not in busy]
        self._messages.selecting.start(len(eligible) - len(idle))
        selection = self.select(server_round, idle) if idle else Selection(())
        self.state.ask(selection, self._messages.selecting.needed(selection), busy)
        self.log.round_started(server_round, selection.names, self.state.aside(self.members))
        at_once = self._evaluates(server_round) and not self.evaluates_after(server_round)
        evaluated = selection.training if at_once else ()
        asked = [self.members[name] for name in selection.names]
        messages = self._messages.dispatch.to_train(server_round, asked, self.instruct)
        instructions: list[tuple[ClientProxy, FitIns]] = [
            (proxy, FitIns(payload, {"evaluate": proxy.name in evaluated, **self.log.kept_too}))
            for proxy, payload in messages
        ]
        self.state.clock.wait()
        return instructions

    def close_round(self, found: Collected) -> None:
        """Take over which clients a round has got when it closed, and tell who is late."""
        self.state.closed(found.late, found.arrived, found.withdrawn, found.clock)
        self._messages.selecting.seconds = found.seconds
        if not self.run.pace.is_simulated:
            self.state.tell_who_is_late()

    def aggregate_fit(
        self, server_round: int, results: list[tuple[ClientProxy, FitRes]], failures: Failures
    ) -> tuple[Parameters, dict[str, Scalar]]:
        """Let the replies pass their steps, and the method aggregate those that are accepted."""
        self.state.clock.replied()
        self._code_faults.enter(failures)
        with self._messages.spool.read():
            trained = {*self.state.selection.training, *self.state.arrived}
            self.state.scores.outdate(trained & {*self.state.expected})
            replies = self._messages.exchange.decode_all(results, failures, self.members)
            now = partial(self.instruct, server_round)
            late = carried_over_by(self.run.pace, self.spec, now)
            steps = checks(self.run, self.spec.replies, self.sizes, self.state, self.members, late)
            accepted = list(through([*steps, self._accepted], replies))
            if self.state.settle([reply.client.name for reply in accepted]):
                self._go_back()
            elif accepted:
                with learning(self.state, self.run):
                    self.state.figures(self.aggregate(server_round, accepted))
                    self.state.figures(mean_figures([r.measured.figures for r in accepted]))
        return NOTHING, dict(self.state.record.method)

    def _accepted(self, replies: Iterable[Reply]) -> Iterator[Reply]:
        """Yield what the method accepts of the replies: their last step."""
        for reply in replies:
            with self.state.dropping(reply.client.name):
                accepted = self.accept(self.state.record.round, reply)
                self.state.measured(reply.client.name, reply.measured)
                self._messages.selecting.answered(reply, self.state.record.round)
                yield accepted

    def evaluate(self, server_round: int, parameters: Parameters) -> None:
        """Do nothing: the server's own models are evaluated when the round closes."""
        return

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        """Ask clients to evaluate if their models have changed since their last evaluation."""
        due = self._evaluates(server_round)
        instructions = self._eval_instructions(server_round) if due else {}
        if not instructions:
            self._close_round()
            return []
        asked = self._messages.dispatch.to_evaluate(
            server_round, self._held_back.beside(self.members), instructions, self._held_back.names
        )
        self.state.clock.wait()
        return list(asked)

    def aggregate_evaluate(
        self, server_round: int, results: list[tuple[ClientProxy, EvaluateRes]], failures: Failures
    ) -> tuple[float | None, dict[str, Scalar]]:
        """Record the accuracies and close the round."""
        self.state.clock.replied()
        self._code_faults.enter(failures)
        for name, reason in sorted(reasons(failures).items()):
            self.state.not_evaluated(name, reason, "silent")
        answers = {name_of(proxy): result for proxy, result in results}
        for name, result in sorted(answers.items()):
            with self.state.not_evaluating(name):
                info = self._held_back.member(name, self.members).info
                kinds = self._held_back.kinds_of(name, self.spec)
                decode = self._messages.exchange.decode_evaluation
                self.state.measured(name, decode(info, result, kinds))
        self._close_round()
        return None, {}

    # What these methods call.

    def _class_names(self, infos: Sequence[ClientInfo]) -> Sequence[str]:
        """Return the class names for per-class metrics, or () if the server cannot read them."""
        if "recall" in self.run.metrics and not any(info.own_data for info in infos):
            with contextlib.suppress(FedhetError):
                return self.data.dataset.classes
        return ()

    def _resume(self, checkpoint: Checkpoint) -> None:
        """Resume after the last complete round. Raises StateError."""
        try:
            self.state.load_json(str(checkpoint.facts["state"]))
            own = self._messages.load(checkpoint.tensors, checkpoint.facts)
            refuse_other_types(own, self.state_dict())
            self.load_state_dict(own)
        except (LookupError, ValueError, TypeError, RuntimeError, AttributeError) as error:
            raise StateError(
                f"the checkpoint of round {checkpoint.round} in {self.log.directory} does not fit "
                f"the method {self.run.method}: {error!r}"
            ) from error

    def _go_back(self) -> None:
        """Restore the last state whose instructions the clients could use."""
        good = self.state.good
        kept = self.log.state_after(good) if good else {}
        self.init()
        if good:
            self.load_state_dict(without_versions(kept))
        self.state.went_back()

    def _evaluates(self, round: int) -> bool:
        due = round % self.run.evaluate_every == 0 and round >= self.run.evaluate_from
        return due or round == self.run.rounds

    def _eval_instructions(self, round: int) -> dict[str, Knowledge]:
        """Return the instructions to evaluate, for clients that are due and have not failed."""
        found: dict[str, Knowledge] = {}
        for name in self.state.present(self.members.keys() - self.collector.busy):
            knowledge = self.eval_instruction(round, self.members[name].info)
            if knowledge is not None or self.state.scores.is_outdated(name):
                found[name] = knowledge or Knowledge()
        last = round == self.run.rounds
        offer = partial(self.eval_instruction, round)
        return found | (self._held_back.instructions(offer) if last else {})

    def _close_round(self) -> None:
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
        self._messages.selecting.finish()
        record = self.state.close(evaluated=evaluated)
        self.log.round_finished(record)
        tensors, facts = self._messages.state()
        whole = {"state": self.state.to_json(), **facts}
        self.log.checkpoint(record.round, {**self.state_dict(), **tensors}, whole, self.state.good)
        self.collector.settled(self.state.arrived)
