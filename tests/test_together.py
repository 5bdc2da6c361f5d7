"""Clients of one architecture that train as one: the numbers of training one after the other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from flwr.common import Code, FitIns, FitRes, Parameters, Status, ndarrays_to_parameters
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet.base.seeding import torch_generator
from fedhet.base.transfer import Numbers
from fedhet.client_runtime import meeting, recipe
from fedhet.client_runtime.meeting import guest_here, meet
from fedhet.client_runtime.stacking import Work, alike, can_be_stacked, pays_on, together
from fedhet.config.resolve import resolve
from fedhet.data import RunData
from fedhet.engines.inline import run_inline
from fedhet.engines.ray.worker import Worker
from fedhet.engines.simulate import simulate
from fedhet.learning import transfer
from fedhet.learning.devices import CPU
from fedhet.learning.objective import CrossEntropy, Objective
from fedhet.learning.training import optimization, train_epochs
from fedhet.methods.registry import all_methods
from fedhet.server.app import components
from fedhet.server.direct_proxy import DirectProxy
from fedhet.server.dispatch import together_of
from fedhet.server.proxy import Group, NamedProxy
from fedhet.settings.run import TrainingSettings
from fedhet.wire.identity import SERVER
from fedhet.wire.knowledge import Envelope, Knowledge, encode

ADAM = {"training.optimizer": "adam", "training.lr": 0.001}
SMALL = {
    "clients": 5, "rounds": 3, "data.max-samples": 200, "data.min-samples": 11,
    "data.max-test-samples": 50, "models.pool": "mlp", "training.local-epochs": 2,
    "training.batch-size": 16, "training.optimizer": "sgd", "training.lr": 0.05,
    "engine.precision": "float32", "engine.together": 4, "engine.backend": "inline",
}  # fmt: skip
METHODS = sorted(name for name, method in all_methods()[0].items() if method.spec.together)


@pytest.fixture
def stacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let everything be stacked that can be, and return the sizes of the stacks."""
    sizes: list[int] = []

    def counted(works):
        sizes.append(len(works))
        return together(works)

    monkeypatch.setattr(recipe, "pays_on", lambda device, objective: True)
    monkeypatch.setattr(meeting, "together", counted)
    return sizes


def run(folder: Path, method: str, model: str, k: int, notice=print, **more: object):
    """Run three small rounds; return their records, and the clients' states by file."""
    config = resolve(SMALL | {"method": method, "models.pool": model, "engine.together": k} | more)
    data = RunData.of(config.run)
    parts = components(config, folder / "run", workers=1, watchers=[], data=data)
    run_inline(config, data, folder / "state", parts, notice)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    files = sorted((folder / "state").rglob("round-*.safetensors"))
    states = {"/".join(path.parts[-2:]): load_file(path) for path in files}
    return [json.loads(line) for line in lines], states


def assert_equal(one, many, tolerance: float = 1e-4) -> None:
    """Compare two runs that should differ by rounding."""
    (records, states), (others, their_states) = one, many
    assert not any(record["failed"] for record in others)
    assert states.keys() == their_states.keys()
    for file, tensors in states.items():
        for name, value in tensors.items():
            torch.testing.assert_close(their_states[file][name], value, rtol=0, atol=tolerance)
    for record, other in zip(records, others, strict=True):
        assert other["loss"]["per_client"] == pytest.approx(record["loss"]["per_client"], abs=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_together_equals_one_by_one(method, stacked, tmp_path):
    # The clients' numbers of samples differ, and so do the last batches.
    one = run(tmp_path / "one", method, "mlp", 1)
    assert not stacked
    many = run(tmp_path / "many", method, "mlp", 4)
    assert stacked == [4, 4, 4]
    assert_equal(one, many)


def test_the_optimiser_is_the_settings_own(stacked, tmp_path):
    # Adam enlarges the rounding of a gradient near zero: a step moves by 0.001.
    one = run(tmp_path / "one", "local", "mlp", 1, **ADAM)
    many = run(tmp_path / "many", "local", "mlp", 4, **ADAM)
    assert_equal(one, many)


def test_these_methods_train_together():
    wanted = "local fedavg fedprox fedbn fedper lg-fedavg felo velo fedproto fedhe fml"
    assert sorted(wanted.split()) == METHODS


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_batch_norms_keep_the_statistics_of_their_own_client(method, stacked, tmp_path):
    one = run(tmp_path / "one", method, "resnet10", 1, **{"training.lr": 0.01})
    many = run(tmp_path / "many", method, "resnet10", 4, **{"training.lr": 0.01})
    assert stacked == [4, 4, 4]
    assert_equal(one, many, 1e-3)


def test_one_process_gives_the_same_numbers_again(stacked, tmp_path):
    first = run(tmp_path / "first", "felo", "mlp", 3)
    again = run(tmp_path / "again", "felo", "mlp", 3)
    for file, tensors in first[1].items():
        for name, value in tensors.items():
            assert torch.equal(value, again[1][file][name]), (file, name)


def test_a_simulated_clock_counts_the_same_work(stacked, tmp_path):
    # Each round closes with three of five answers, the others are late.
    paced = {"pace.clock": "log-normal", "pace.enough": 3.0}
    one = run(tmp_path / "one", "fedavg", "mlp", 1, **paced)
    many = run(tmp_path / "many", "fedavg", "mlp", 4, **paced)
    assert stacked
    for record, other in zip(one[0], many[0], strict=True):
        for name in ("asked", "late", "clock"):
            assert other[name] == record[name]


def test_clients_that_a_round_may_not_await_train_alone():
    def most(**changes: object) -> int:
        config = resolve(SMALL | {"method": "felo"} | changes)
        return together_of(config.method.spec, config.run)

    early = {"pace.enough": 3.0}
    assert most() == 4
    assert most(**early) == most(**{"pace.timeout": "60"}) == 1
    assert most(**early, **{"pace.clock": "log-normal"}) == 4
    assert most(**{"pace.stragglers": 0.5}) == most(method="fedtgp") == 1


def test_clients_too_large_together_are_asked_one_by_one(stacked, monkeypatch, tmp_path):
    one = run(tmp_path / "one", "velo", "mlp", 1)

    def too_large(works):
        for work in works:
            next(iter(work.objective.parameters())).data.fill_(7.0)
        raise torch.OutOfMemoryError("CUDA out of memory")

    said: list[str] = []
    monkeypatch.setattr(meeting, "together", too_large)
    many = run(tmp_path / "many", "velo", "mlp", 4, said.append)
    assert said == [
        "client-0 and 3 others find too little memory on the GPU to train as one: "
        "each is asked by itself"
    ] * len(many[0])
    for file, tensors in one[1].items():
        for name, value in tensors.items():
            assert torch.equal(value, many[1][file][name]), (file, name)


# A group of clients, as the server asks it.


class Called(DirectProxy):
    """A client that notes what it is asked, and how."""

    def __init__(self, cid: str, answer: FitRes | None, asked: list[str]) -> None:
        super().__init__(cid)
        self.answer, self.asked = answer, asked

    @classmethod
    def fit_together(cls, proxies, instructions, timeout):
        proxies[0].asked.append("+".join(proxy.cid for proxy in proxies))
        return [proxy.answer for proxy in proxies]

    def call(self, name, instruction, timeout):
        self.asked.append(f"{self.cid} {instruction.parameters.tensors}")
        return answer_of("alone")


def answer_of(text: str, **metrics: bool) -> FitRes:
    payload = Parameters([text.encode()], "")
    return FitRes(Status(Code.OK, ""), payload, 1, {**metrics})


def test_each_of_a_group_gets_its_answer_or_is_asked_alone():
    asked: list[str] = []
    answers = [answer_of("first"), answer_of("", lacks=True), None, answer_of("withdrawn")]
    proxies = {}
    for number, answer in enumerate(answers):
        member = SimpleNamespace(
            info=SimpleNamespace(name=f"client-{number}"),
            proxy=Called(str(number), answer, asked),
        )
        proxies[NamedProxy(member, lambda *said: None)] = Parameters([b"part"], "")
    group = Group(proxies)
    for proxy in proxies:
        proxy.group, proxy.again = group, lambda: Parameters([b"whole"], "")
    # The last one is withdrawn before it begins.
    found = [proxy.fit(FitIns(sent, {}), None, 1) for proxy, sent in [*proxies.items()][:3]]
    assert [each.parameters.tensors for each in found] == [[b"first"], [b"alone"], [b"alone"]]
    assert asked == ["0+1+2+3", "1 [b'whole']", "2 [b'part']"]
    assert all(proxy.sent for proxy in [*proxies][:3])


# The stack by itself, on networks made here.


class Normed(nn.Module):
    """A network with a batch norm."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first, self.norm, self.last = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())


def work_of(number: int, samples: int, epochs: int = 2, model: nn.Module | None = None) -> Work:
    """Return a client's epochs; equal numbers give equal ones."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(samples, 5, generator=generator)
    y = torch.randint(0, 3, (samples,), generator=generator)
    model = model or Normed(number)
    optimizing = optimization(model.parameters(), TrainingSettings(optimizer="sgd", lr=0.05), CPU)
    batches = torch_generator(1, f"client-{number}", 1, "batches")
    return Work(CrossEntropy(model), x, y, optimizing, epochs, 8, batches, CPU)


def alone(work: Work) -> float:
    """Train as a client does by itself."""
    return train_epochs(
        work.x,
        work.y,
        work.objective,
        work.optimizing,
        epochs=work.epochs,
        batch_size=work.batch_size,
        generator=work.generator,
        compute=work.compute,
    )


def test_clients_of_other_sizes_are_stacked_without_padding():
    # 8, 8 and 3; 8 and 4; five batches of 8, and 2: only full batches are computed at once.
    sizes = [19, 12, 42, 2]
    expected = [work_of(number, samples) for number, samples in enumerate(sizes)]
    losses = [alone(work) for work in expected]
    works = [work_of(number, samples) for number, samples in enumerate(sizes)]
    assert together(works) == pytest.approx(losses, abs=1e-5)
    for work, other in zip(works, expected, strict=True):
        for name, value in other.objective.state_dict().items():
            own = work.objective.state_dict()[name]
            torch.testing.assert_close(own, value, rtol=0, atol=1e-5, msg=name)
    norms = [work.objective.model.norm for work in works]
    assert [int(norm.num_batches_tracked) for norm in norms] == [6, 4, 12, 2]


def test_each_client_has_dropout_masks_of_its_own():
    class Noted(Objective):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("kept", torch.zeros(8))

        def loss(self, x: Tensor, y: Tensor, *drawn: Tensor) -> Tensor:
            mask = F.dropout(torch.ones_like(x[:, 0]), 0.5)
            self.kept.copy_(mask)
            return (x.mean() * self.weight).sum()

    works = []
    for number in range(4):
        work, objective = work_of(number, 8, epochs=1), Noted()
        chosen = optimization(objective.parameters(), TrainingSettings(), CPU)
        works.append(Work(objective, work.x, work.y, chosen, 1, 8, work.generator, CPU))
    together(works)
    masks = {tuple(work.objective.kept.tolist()) for work in works}
    assert len(masks) > 1
    assert {value for mask in masks for value in mask} == {0.0, 2.0}


def test_only_equal_objectives_are_alike():
    base = alike(work_of(0, 10))
    assert alike(work_of(1, 20)) == base
    assert alike(work_of(0, 10, model=nn.Linear(5, 3))) != base
    frozen = Normed(0)
    frozen.norm.eval()
    assert alike(work_of(0, 10, model=frozen)) != base
    slower, work = TrainingSettings(lr=0.5), work_of(0, 10)
    chosen = optimization(work.objective.parameters(), slower, CPU)
    assert alike(Work(work.objective, work.x, work.y, chosen, 2, 8, work.generator, CPU)) != base


def test_a_network_that_cannot_be_stacked_trains_alone():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            scale = 2.0 if float(x.sum()) > 0 else 1.0  # a value that vmap does not have
            return self.layer(x) * scale

    works = [work_of(number, 10, model=Odd()) for number in range(2)]
    drawn = [work.generator.get_state() for work in works]
    before = torch.get_rng_state()
    assert not can_be_stacked(works)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(w.generator.get_state(), d) for w, d in zip(works, drawn, strict=True))
    assert can_be_stacked([work_of(0, 10), work_of(1, 10)])


def test_a_trial_takes_no_numbers_of_those_that_are_drawn(monkeypatch):
    monkeypatch.setattr(transfer, "to_device", lambda x, device: x)

    class Drawing(CrossEntropy):
        def __init__(self, model: nn.Module, seed: int) -> None:
            super().__init__(model)
            self._generator = torch.Generator().manual_seed(seed)
            self._numbers = Numbers(
                lambda n: torch.rand(n, generator=self._generator), torch.device("cuda")
            )

        def drawn(self, y: Tensor) -> tuple[Tensor, ...]:
            return (self._numbers.take(len(y)),)

    works = []
    for number in range(2):
        work = work_of(number, 10)
        works.append(replace(work, objective=Drawing(work.objective.model, number)))
    works[0].objective.drawn(works[0].y)
    assert can_be_stacked(works)
    for number, work in enumerate(works):
        expected = torch.rand(10000, generator=torch.Generator().manual_seed(number))
        start = 10 if number == 0 else 0
        (taken,) = work.objective.drawn(torch.zeros(6000))
        assert torch.equal(taken, expected[start : start + 6000])


def test_on_a_processor_it_pays_for_linear_layers():
    assert pays_on(CPU.device, CrossEntropy(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
    assert not pays_on(CPU.device, CrossEntropy(nn.Sequential(nn.Linear(300, 300))))
    assert not pays_on(CPU.device, CrossEntropy(nn.Sequential(nn.Conv2d(1, 1, 1))))
    assert pays_on(torch.device("cuda"), CrossEntropy(nn.Sequential(nn.Conv2d(1, 1, 1))))


# Taking turns.


def test_a_guest_draws_what_it_would_draw_alone():
    def call(number: int) -> list[float]:
        torch.manual_seed(number)
        drawn = [torch.rand(()).item()]
        guest_here().train(work_of(number, 10))
        return [*drawn, torch.rand(()).item()]

    # The first also draws for all while they train: nothing is drawn there without dropout.
    torch.manual_seed(99)
    found = meet([lambda n=n: call(n) for n in range(3)])
    after = torch.rand(()).item()
    for number in range(3):
        torch.manual_seed(number)
        assert found[number] == [torch.rand(()).item(), torch.rand(()).item()]
    torch.manual_seed(99)
    assert after == torch.rand(()).item()


def test_an_error_of_one_client_leaves_the_others():
    def call(number: int) -> float:
        if number == 1:
            raise ValueError("this one")
        return guest_here().train(work_of(number, 10))

    first, second, third = meet([lambda n=n: call(n) for n in range(3)])
    assert isinstance(second, ValueError)
    assert [first, third] == pytest.approx([alone(work_of(0, 10)), alone(work_of(2, 10))])


def test_an_error_of_the_common_training_reaches_each_client(monkeypatch):
    def broken(works):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(meeting, "together", broken)
    found = meet([lambda n=n: guest_here().train(work_of(n, 10)) for n in range(2)])
    assert [str(error) for error in found] == ["out of memory"] * 2


@pytest.mark.slow
def test_rays_workers_train_clients_together(tmp_path):
    # On a processor an mlp is stacked by the rule itself: in process the same clients meet.
    found = {}
    for backend in ("inline", "ray"):
        config = resolve(SMALL | {"method": "felo", "engine.backend": backend, "rounds": 2})
        simulate(config, tmp_path / backend)
        lines = (tmp_path / backend / "metrics.jsonl").read_text().splitlines()
        found[backend] = [json.loads(line) for line in lines]
    for one, other in zip(found["inline"], found["ray"], strict=True):
        assert not other["failed"]
        assert one["accuracy"] == other["accuracy"]
        assert one["loss"] == other["loss"]


def test_a_worker_answers_for_each_of_its_clients(stacked, tmp_path):
    config = resolve(SMALL | {"method": "local", "data.alpha": 100.0})
    envelope = Envelope("run", "local", 1, SERVER)
    asked = FitIns(ndarrays_to_parameters(encode(envelope, Knowledge())), {"evaluate": False})
    other = FitIns(ndarrays_to_parameters([]), {})
    worker = Worker(config, str(tmp_path))
    first, second, third = worker.fit_together([0, 1, 2], [asked, other, asked])
    assert stacked == [2]
    assert "error" in second.metrics
    assert not {"error"} & (first.metrics.keys() | third.metrics.keys())
    assert first.metrics["loss"] != third.metrics["loss"]
