"""The server half of every method: a Flower strategy around three functions that a method writes.

`init`, `configure` and `aggregate` are the method. What surrounds them is here: seeded sampling
by the clients' names, validation of every reply, counts of bytes and seconds, accuracies.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from flwr.common import (
    Code,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    Parameters,
    Scalar,
    ndarrays_to_parameters,
)
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import Strategy
from torch import nn

from fedhet.arrays import Array, Shapes
from fedhet.config.resolve import data_spec, pool
from fedhet.config.schema import MethodSettings, Settings, refused
from fedhet.data import Split, common_test, public_set
from fedhet.devices import compute_for
from fedhet.errors import DataError, FedhetError, KnowledgeError, StateError
from fedhet.runs.log import RunLog
from fedhet.runs.records import (
    Accuracy,
    Measured,
    RoundRecord,
    read_measures,
    relative,
    spread,
    summarise,
)
from fedhet.seeding import numpy_rng
from fedhet.server.attacks import Attack
from fedhet.server.members import Member, Roster
from fedhet.server.proxy import Courier, Failures, StoredReply, name_of, reasons
from fedhet.storage import Checkpoint
from fedhet.training import evaluate
from fedhet.wire.contract import Contract, WeightsField
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import (
    Envelope,
    Knowledge,
    decode,
    encode,
    expect,
    payload_bytes,
    read_arrays,
)

NOTHING = Parameters(tensors=[], tensor_type="numpy.ndarray")
NOTHING_TO_SAY = Knowledge()
SERVER = "server"

Told = Knowledge | Callable[[], Knowledge]
"""What a client is told, or what makes it when the client is about to be asked."""


@dataclass(frozen=True)
class Reply:
    """A client's answer, validated."""

    client: ClientInfo
    knowledge: Knowledge
    samples: int
    """Training samples, from what the client said of itself at the start."""


class HetStrategy(Strategy):
    """A method's server half.

    A method sets the class variables and writes `init`, `configure` and `aggregate`; one that
    exchanges weights or features says in `dims` and `shapes` what sizes they have.
    """

    title: ClassVar[str]
    paper: ClassVar[str]
    headline: ClassVar[Literal["personal", "common"]]
    settings_type: ClassVar[type[MethodSettings]] = MethodSettings
    sends: ClassVar[Contract] = Contract()
    """The fields of what `configure` returns."""
    needs_public: ClassVar[bool] = False
    """Does the method work on data that no client owns? See `public_set`."""
    needs_unlabelled: ClassVar[bool] = False
    """Does the method work on samples of the clients' own that have no label?"""
    default_model: ClassVar[str] = ""
    """The model of all clients where the user chooses none; empty: the usual pool."""
    spools: ClassVar[bool] = False
    """Are replies put on disk as they come, as where each client sends a model to be kept?"""

    def __init__(
        self, run: Settings, settings: MethodSettings, receives: Contract, log: RunLog
    ) -> None:
        self.run = run
        self.settings = settings
        self.receives = receives
        self.log = log
        self.run_name = log.run_name
        self.members: dict[str, Member] = {}
        self._attack = Attack(run, receives) if run.attack != "none" else None
        weighed = any(isinstance(f, WeightsField) for f in (*receives.fields, *self.sends.fields))
        self._roster = Roster(run.round_timeout, pool(run) if weighed else None, log.notice)
        self._accuracy: Accuracy = {}
        self._stale: set[str] = set()
        """Clients whose models have changed since they were last measured."""
        self._record = RoundRecord(0)
        self._losses: dict[str, float] = {}
        self._absent: set[str] = set()
        self._turns = threading.BoundedSemaphore(run.in_flight or log.workers)
        self._counting = threading.Lock()
        self._round_started = self._waiting_since = self._waiting = 0.0

    # What a method writes.

    @classmethod
    def fixed_rounds(cls, settings: MethodSettings) -> int | None:
        """Return the rounds that the method takes by its settings; None: as `rounds` says."""
        return None

    def init(self) -> None:
        """Prepare the server's state; the members are known."""

    def configure(self, round: int, client: ClientInfo) -> Told:
        """Return what `client` is told in `round`; one object for several is encoded once.

        Where each client is told something large of its own, return a function that makes it: it
        is called, by another thread, when the client's turn has come.
        """
        raise NotImplementedError

    def trains(self, client: str) -> bool:
        """Tell whether this round's instruction may change the client's models."""
        return True

    def keep(self, round: int, reply: Reply) -> Reply:
        """Put aside what is too large to hold until all replies are read; return the rest."""
        return reply

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Take in the replies, sorted by client; return the method's own figures of the round."""
        raise NotImplementedError

    def check_reply(self, round: int, client: ClientInfo, knowledge: Knowledge) -> None:
        """Raise KnowledgeError for what is wrong with a reply that keeps the contract."""

    def judge(self, round: int, client: ClientInfo) -> Knowledge | None:
        """Return what `client` needs to know to be judged after `round`.

        None: those alone are asked whose last measurement is out of date, and told nothing.
        """
        return None

    def judged(self) -> Mapping[str, nn.Module]:
        """Return the models that the server alone has, by kind, to be measured."""
        return {}

    def saved(self) -> dict[str, Array]:
        """Return what the method keeps over rounds, by name, for the round's checkpoint."""
        return {}

    def restore(self, saved: Mapping[str, Array]) -> None:
        """Take back what `saved` returned at the end of a round; `init` has been called."""

    def dims(self) -> dict[str, int]:
        """Return the run's sizes by the letters of the contract; C is the number of classes."""
        return {"C": self.classes}

    def shapes(self, client: ClientInfo) -> dict[str, Shapes]:
        """Return, for each WeightsField of the client's replies, the tensors of its model."""
        return {}

    @property
    def task(self) -> ClientInfo:
        """Return the client that fixes the task: the first by name."""
        return next(iter(self.members.values())).info

    @property
    def classes(self) -> int:
        """Return the number of classes."""
        return self.task.classes

    def one_model(self) -> str:
        """Return the model that all clients have. Raises SettingsError where they differ."""
        found = sorted({member.info.model for member in self.members.values()})
        if len(found) > 1:
            raise refused(
                "models",
                self.run.models,
                f"one model for all clients with {self.run.method}, which averages their weights; "
                f"they have {', '.join(found)}",
            )
        return found[0]

    def public_set(self, *, labelled: bool) -> Split:
        """Return the data that no client owns, scaled; `labelled` if its labels are to be used."""
        classes = self.classes if labelled else None
        return public_set(data_spec(self.run), self.task.shape, classes)

    def common_test(self) -> Split | None:
        """Return the common test set, scaled, or None where there is none of the clients' task."""
        try:
            common = common_test(data_spec(self.run))
        except DataError:  # sites with data of their own; 'dataset' names what is not here
            return None
        fits = common is not None and tuple(common.x.shape[1:]) == self.task.shape
        return common if fits else None

    # What Flower calls, in the order of a round.

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters:
        """Wait for the clients, learn who they are, and prepare the method."""
        self._wait_for_clients(client_manager)
        self.members = self._roster.members(client_manager)
        least = self.run.min_clients or self.run.clients
        if len(self.members) < least:
            raise FedhetError(
                f"{len(self.members)} clients can take part, at least {least} must: see the "
                "notices; 'min-clients' lets a run start with fewer"
            )
        self.log.begin({name: member.info.model for name, member in self.members.items()})
        self._stale = set(self.members)
        self.init()
        if self.log.resumed:
            self._go_on(self.log.resumed)
        return NOTHING

    def _go_on(self, checkpoint: Checkpoint) -> None:
        """Take up the run after the last whole round. Raises StateError."""
        try:
            books = json.loads(str(checkpoint.facts["books"]))
            self._accuracy, self._stale = books["accuracy"], set(books["stale"])
            self.restore(checkpoint.tensors)
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise StateError(
                f"the checkpoint of round {checkpoint.round} in {self.log.directory} does not fit "
                f"the method {self.run.method}: {error!r}"
            ) from error

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Sample clients by name and give each its instruction."""
        self._round_started, self._waiting = time.perf_counter(), 0.0
        self._record, self._losses, self._absent = RoundRecord(server_round), {}, set()
        self.members = self._roster.members(client_manager) or self.members
        self.log.joined({name: member.info.model for name, member in self.members.items()})
        asked = self.sample(server_round, list(self.members))
        self._record.asked = asked
        self.log.round_started(server_round, asked)
        told = {name: self.configure(server_round, self.members[name].info) for name in asked}
        at_once = {name: k for name, k in told.items() if isinstance(k, Knowledge)}
        payloads = self._payloads(server_round, at_once)
        evaluates = self._evaluates(server_round)
        instructions: list[tuple[ClientProxy, FitIns]] = [
            (
                self._courier(server_round, name, knowledge),
                FitIns(payloads.get(name, NOTHING), {"evaluate": evaluates and self.trains(name)}),
            )
            for name, knowledge in told.items()
        ]
        self._waiting_since = time.perf_counter()
        return instructions

    def aggregate_fit(
        self, server_round: int, results: list[tuple[ClientProxy, FitRes]], failures: Failures
    ) -> tuple[Parameters, dict[str, Scalar]]:
        """Validate the replies, name who is missing, and let the method aggregate."""
        self._waiting += time.perf_counter() - self._waiting_since
        answers = {name_of(proxy): result for proxy, result in results}
        why = reasons(failures)
        self._stale |= set(filter(self.trains, self._record.asked))
        replies = []
        for name in sorted(self._record.asked):
            if name not in answers:
                self._absent.add(name)
                self._drop(name, why.get(name, "did not answer in time"))
                continue
            with self._dropping(name):
                reply = self._accept(server_round, name, answers[name])
                replies.append(reply if self._attack else self.keep(server_round, reply))
        if self._attack:
            replies = self._attacked(self._attack, server_round, replies)
        self._record.answered = [reply.client.name for reply in replies]
        if replies:
            self._record.method |= self.aggregate(server_round, replies)
        return NOTHING, {name: float(value) for name, value in self._record.method.items()}

    def evaluate(self, server_round: int, parameters: Parameters) -> None:
        """Nothing: what the server alone measures is part of a method's figures."""
        return

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        """Ask those clients to evaluate whose last measurement is not of their present models."""
        told = self._to_be_judged(server_round) if self._evaluates(server_round) else {}
        if not told:
            self._close_round()
            return []
        payloads = self._payloads(server_round, told)
        self._waiting_since = time.perf_counter()
        return [
            (Courier(self.members[name], self.log.client_answered), EvaluateIns(payload, {}))
            for name, payload in payloads.items()
        ]

    def aggregate_evaluate(
        self, server_round: int, results: list[tuple[ClientProxy, EvaluateRes]], failures: Failures
    ) -> tuple[float | None, dict[str, Scalar]]:
        """Take the accuracies in and close the round."""
        self._waiting += time.perf_counter() - self._waiting_since
        for name, reason in sorted(reasons(failures).items()):
            self.log.notice(f"client {name} was not evaluated: {reason}")
        answers = {name_of(proxy): result for proxy, result in results}
        for name, result in sorted(answers.items()):
            try:
                if "error" in result.metrics:
                    raise KnowledgeError(name, "answer", str(result.metrics["error"])[:300])
                self._note(name, read_measures(name, result.metrics))
            except KnowledgeError as error:
                self.log.notice(f"client {name} was not evaluated: {error}")
        self._close_round()
        return None, {}

    # The steps of the above.

    def _wait_for_clients(self, manager: ClientManager) -> None:
        """Wait until all clients are there. Raises FedhetError where too few come in time."""
        wanted, seconds = self.run.clients, self.run.join_timeout
        if manager.num_available() >= wanted:
            return
        self.log.notice(f"waiting for {wanted} clients, {manager.num_available()} are there")
        if manager.wait_for(wanted, int(seconds)):
            return
        there = f"{manager.num_available()} of {wanted} clients are there after {seconds:g} s"
        if manager.num_available() < (self.run.min_clients or wanted):
            raise FedhetError(
                f"{there}: start the others, or change 'clients', 'join-timeout' or 'min-clients'"
            )
        self.log.notice(f"{there}; the run starts with them")

    def sample(self, round: int, names: Sequence[str]) -> list[str]:
        """Return the clients of a round, sorted: a share `fraction` of `names`, at least one."""
        count = max(1, round_half_up(self.run.fraction * len(names)))
        order = numpy_rng(self.run.seed, "sample", round).permutation(len(names))
        return sorted(sorted(names)[index] for index in order[:count])

    def _payloads(self, round: int, told: Mapping[str, Knowledge]) -> dict[str, Parameters]:
        """Encode what each client is told, one object once, and count the bytes."""
        encoded = {
            id(k): self._encode(round, k) for k in {id(k): k for k in told.values()}.values()
        }
        payloads = {name: encoded[id(knowledge)] for name, knowledge in told.items()}
        self._record.bytes_down += sum(map(payload_bytes, payloads.values()))
        return payloads

    def _courier(self, round: int, name: str, told: Told) -> Courier:
        """Return the way to a client that is told `told`, which may be made on the way."""
        proxy = Courier(self.members[name], self.log.client_answered)
        if not isinstance(told, Knowledge):
            proxy.make = partial(self._make, round, told)
            proxy.turn = self._turns
        if self.spools:
            proxy.spool = self.log.directory / "inbox"
        return proxy

    def _make(self, round: int, told: Callable[[], Knowledge]) -> Parameters:
        payload = self._encode(round, told())
        with self._counting:
            self._record.bytes_down += payload_bytes(payload)
        return payload

    def _encode(self, round: int, knowledge: Knowledge) -> Parameters:
        envelope = Envelope(self.run_name, self.run.method, round, SERVER)
        return ndarrays_to_parameters(encode(envelope, knowledge))

    def _accept(self, round: int, name: str, result: FitRes) -> Reply:
        """Return the reply of a client, validated. Raises KnowledgeError."""
        payload = result.parameters
        if isinstance(
            payload, StoredReply
        ):  # not put into `result`, which outlives this reply's turn
            payload = payload.take()
        self._record.bytes_up += payload_bytes(payload)
        if result.status.code != Code.OK or "error" in result.metrics:
            fault = str(result.metrics.get("error", result.status.message))[:300]
            raise KnowledgeError(name, "answer", fault)
        limit = int(self.run.max_payload_mb * 1e6)
        envelope, knowledge = decode(read_arrays(payload, name, limit), name)
        expect(envelope, run=self.run_name, method=self.run.method, round=round, sender=name)
        info = self.members[name].info
        self._check(info, knowledge)
        self.check_reply(round, info, knowledge)
        measured = read_measures(name, result.metrics)
        self._note(name, measured)
        return Reply(info, knowledge, info.samples)

    def _check(self, client: ClientInfo, knowledge: Knowledge) -> None:
        """Raise KnowledgeError unless a client's answer keeps the method's contract."""
        self.receives.check(
            client.name,
            knowledge.tensors,
            knowledge.scalars,
            dims=self.dims(),
            shapes=self.shapes(client),
        )

    def _attacked(self, attack: Attack, round: int, replies: list[Reply]) -> list[Reply]:
        """Return the replies, some of them poisoned; what then breaks the contract is dropped."""
        # Who only looks sends nothing that could be poisoned.
        struck = attack.victims(round, list(filter(self.trains, self._record.asked)))
        told = attack.poison(round, {r.client.name: r.knowledge for r in replies}, struck)
        self._record.method["poisoned"] = float(len(struck & told.keys()))
        taken = []
        for reply in replies:
            name = reply.client.name
            with self._dropping(name):
                self._check(reply.client, told[name])
                poisoned = Reply(reply.client, told[name], reply.samples)
                taken.append(self.keep(round, poisoned))
        return taken

    @contextlib.contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        """Drop a client from the round for what is wrong with its reply."""
        try:
            yield
        except KnowledgeError as error:
            self._drop(name, f"{error.field}: {error.fault}")
        except FedhetError as error:
            self._drop(name, str(error))

    def _note(self, name: str, measured: Measured) -> None:
        """Enter what a client measured into the round's record."""
        for (protocol, kind), accuracy in measured.accuracy.items():
            self._accuracy.setdefault(protocol, {}).setdefault(kind, {})[name] = accuracy
        if measured.accuracy:
            self._stale.discard(name)
        if measured.loss is not None:
            self._losses[name] = measured.loss
        self._record.seconds.train += measured.train_seconds
        self._record.seconds.evaluate += measured.evaluate_seconds
        self.log.peak_memory_mb = max(self.log.peak_memory_mb, measured.memory_mb)

    def _drop(self, name: str, reason: str) -> None:
        self._record.failed[name] = reason
        self.log.notice(f"client {name} is dropped from round {self._record.round}: {reason}")

    def _evaluates(self, round: int) -> bool:
        return round % self.run.evaluate_every == 0 or round == self.run.rounds

    def _to_be_judged(self, round: int) -> dict[str, Knowledge]:
        """Return what those are told who have to be asked, and can be expected to answer."""
        told: dict[str, Knowledge] = {}
        for name in sorted(self.members.keys() - self._absent):
            knowledge = self.judge(round, self.members[name].info)
            if knowledge is not None or name in self._stale:
                told[name] = knowledge or NOTHING_TO_SAY
        return told

    def _close_round(self) -> None:
        record = self._record
        if self._evaluates(record.round):
            self._measure_own()
            record.accuracy = summarise(self._accuracy, without=self._stale)
            record.relative = relative(self._accuracy, without=self._stale)
        record.loss = spread(self._losses) if self._losses else None
        record.seconds.total = time.perf_counter() - self._round_started
        record.seconds.server = record.seconds.total - self._waiting
        self.log.round_finished(record)
        books = json.dumps({"accuracy": self._accuracy, "stale": sorted(self._stale)})
        self.log.checkpoint(record.round, self.saved(), {"books": books})

    def _measure_own(self) -> None:
        """Enter how the server's own models do on the common test set, as SERVER's accuracy."""
        models = self.judged()
        if not models or (common := self.common_test()) is None:
            return
        compute, size = compute_for(self.run), self.run.eval_batch_size
        for kind, model in models.items():
            reached = evaluate(model, common.x, common.y, compute, size).accuracy
            self._accuracy.setdefault("common", {}).setdefault(kind, {})[SERVER] = reached


def round_half_up(value: float) -> int:
    """Return the nearest whole number; halves go up."""
    return int(value + 0.5)
