"""The training loop against plain PyTorch, evaluation against numpy, devices, and seeds."""

import copy
import importlib
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from federation import records, run, small, without_figures
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedhet.base.errors import DataError, SettingsError
from fedhet.base.seeding import derive, numpy_rng, seeded, torch_generator
from fedhet.learning.devices import (
    CPU,
    Compute,
    available_devices,
    compute_for,
    evaluation_batch,
    find_device,
    resolve_precision,
)
from fedhet.learning.training import (
    CrossEntropy,
    batches,
    evaluate,
    logits_of,
    optimization_for,
    train_epochs,
)
from fedhet.models import build
from fedhet.settings.engine import ComputeSettings, EngineSettings
from fedhet.settings.run import TrainingSettings


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# --- batches --------------------------------------------------------------------------------


@settings(max_examples=300, derandomize=True)
@given(st.integers(2, 300), st.integers(1, 64), st.integers(0, 2**40))
def test_epoch_is_a_permutation_in_batches(samples, batch_size, seed):
    cut = batches(samples, batch_size, generator(seed))
    assert sorted(torch.cat(cut).tolist()) == list(range(samples))
    sizes = [len(batch) for batch in cut]
    size = max(batch_size, 2)
    assert min(sizes) >= 2
    assert all(full == size for full in sizes[:-1])
    assert sizes[-1] <= size + 1
    # No fewer batches than it takes: only a sample left over alone joins the one before.
    whole, rest = divmod(samples, size)
    assert len(sizes) == max(whole + (rest > 1), 1)


@settings(max_examples=100, derandomize=True)
@given(st.integers(2, 100), st.integers(1, 20), st.integers(0, 1000))
def test_same_generator_gives_the_same_batches(samples, batch_size, seed):
    first, second = (batches(samples, batch_size, generator(seed)) for _ in range(2))
    assert [b.tolist() for b in first] == [b.tolist() for b in second]


def test_each_epoch_and_each_seed_has_its_own_order():
    draws = generator(5)
    orders = [torch.cat(batches(50, 8, draws)).tolist() for _ in range(3)]
    orders.append(torch.cat(batches(50, 8, generator(6))).tolist())
    orders.append(list(range(50)))
    assert len({tuple(order) for order in orders}) == 5


def test_batches_draw_only_from_their_generator():
    before = torch.get_rng_state()
    batches(50, 8, generator())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("samples", [0, 1])
def test_single_sample_raises(samples):
    with pytest.raises(DataError, match=rf"2 samples.* {samples}"):
        batches(samples, 8, generator())


# --- train_epochs against a plain loop ------------------------------------------------------


def small_net(dropout=0.0):
    with torch.random.fork_rng():
        torch.manual_seed(11)
        layers = [nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout)]
        return nn.Sequential(*layers, nn.Linear(16, 4))


def data(samples=75, seed=2):
    draws = generator(seed)
    x = torch.randn(samples, 6, generator=draws)
    return x, (x[:, :4] + 0.3 * torch.randn(samples, 4, generator=draws)).argmax(1)


def plain_optimizer(model, run, fused):
    usual = {"lr": run.lr, "weight_decay": run.weight_decay, "fused": fused or None}
    if run.optimizer != "sgd":
        kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
        return kinds[run.optimizer](model.parameters(), **usual)
    return torch.optim.SGD(model.parameters(), momentum=run.momentum, **usual)


def plain_loop(model, x, y, run, epochs, fused=True):
    """A plain training loop that returns each epoch's mean loss over samples."""
    optimizer = plain_optimizer(model, run, fused)
    draws = generator(4)
    means = []
    for _ in range(epochs):
        losses = []
        for index in batches(len(y), run.batch_size, draws):
            optimizer.zero_grad()
            logits = model(x[index])
            losses += nn.functional.cross_entropy(logits, y[index], reduction="none").tolist()
            nn.functional.cross_entropy(logits, y[index]).backward()
            optimizer.step()
        means.append(float(np.mean(losses)))
    return means


RUNS = {
    "adam": TrainingSettings(optimizer="adam", lr=0.01, batch_size=16),
    "adam, decay": TrainingSettings(optimizer="adam", lr=0.003, batch_size=7, weight_decay=0.01),
    "adamw": TrainingSettings(optimizer="adamw", lr=0.003, batch_size=16, weight_decay=0.1),
    "sgd": TrainingSettings(optimizer="sgd", lr=0.1, batch_size=37, momentum=0.0),
    "sgd, momentum, decay": TrainingSettings(
        optimizer="sgd", lr=0.05, batch_size=16, momentum=0.9, weight_decay=5e-4
    ),
}
"""75 samples: 16 leave 11, 7 leave 5, and 37 leave 1, which joins the batch before."""


def trained(run, epochs=3, compute=CPU, model=None, seed=4):
    model = model or small_net()
    x, y = data()
    optimizing, draws = optimization_for(model.parameters(), run, compute), generator(seed)
    given = x, y, CrossEntropy(model), optimizing
    usual = {"batch_size": run.batch_size, "generator": draws, "compute": compute}
    losses = [train_epochs(*given, epochs=1, **usual) for _ in range(epochs)]
    return model, losses


def states(*models):
    return zip(*(model.state_dict().items() for model in models), strict=True)


@pytest.mark.parametrize("case", RUNS)
@pytest.mark.usefixtures("steady_adam")
def test_fused_optimizer_equals_the_default(case):
    run = RUNS[case]
    model, losses = trained(run)
    plain = small_net()
    expected = plain_loop(plain, *data(), run, epochs=3, fused=False)
    assert losses == pytest.approx(expected, rel=1e-3)
    for (name, tensor), (_, reference) in states(model, plain):
        np.testing.assert_allclose(tensor, reference, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("case", RUNS)
def test_train_epochs_equals_a_loop_of_epochs(case):
    run = RUNS[case]
    model, plain, seen, steps = small_net(), small_net(), [], []
    loss = train_epochs(
        *data(),
        CrossEntropy(model),
        optimization_for(model.parameters(), run, CPU),
        epochs=3,
        batch_size=run.batch_size,
        generator=generator(4),
        compute=CPU,
        before_epoch=lambda epoch: seen.append((epoch, len(steps))),
        after_batch=lambda: steps.append(0),
    )
    expected = plain_loop(plain, *data(), run, epochs=3)
    assert loss == pytest.approx(expected[-1], rel=1e-5)
    for (name, tensor), (_, reference) in states(model, plain):
        assert torch.equal(tensor, reference), name
    batches_an_epoch = len(batches(75, run.batch_size, generator()))
    assert seen == [(epoch, epoch * batches_an_epoch) for epoch in range(3)]
    assert len(steps) == 3 * batches_an_epoch


def test_settings_change_the_result():
    """Each setting changes the weights, so none is ignored."""
    base = TrainingSettings(
        optimizer="sgd", lr=0.05, batch_size=16, momentum=0.9, weight_decay=0.01
    )
    changes = [{}, {"optimizer": "adam"}, {"lr": 0.04}, {"batch_size": 15}]
    changes += [{"momentum": 0.8}, {"weight_decay": 0.0}]
    ends = [
        tuple(trained(base.model_copy(update=change))[0][0].weight.ravel().tolist())
        for change in changes
    ]
    assert len(set(ends)) == len(changes)


def test_training_does_not_change_the_data():
    x, y = data()
    before = x.clone(), y.clone()
    model = small_net()
    optimizing = optimization_for(model.parameters(), RUNS["adam"], CPU)
    options = {"batch_size": 16, "generator": generator(), "compute": CPU}
    train_epochs(x, y, CrossEntropy(model), optimizing, epochs=1, **options)
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])


def test_only_given_parameters_are_trained():
    model = small_net()
    before = copy.deepcopy(model.state_dict())
    x, y = data()
    optimizing = optimization_for(model[4].parameters(), RUNS["sgd"], CPU)
    options = {"batch_size": 16, "generator": generator(), "compute": CPU}
    train_epochs(x, y, CrossEntropy(model), optimizing, epochs=1, **options)
    assert torch.equal(model[0].weight, before["0.weight"])
    assert not torch.equal(model[4].weight, before["4.weight"])


# --- evaluation against numpy ---------------------------------------------------------------


def numpy_score(weight, bias, x, y):
    logits = x.astype(np.float64) @ weight.T + bias
    shifted = logits - logits.max(1, keepdims=True)
    log_probability = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return (logits.argmax(1) == y).mean(), -log_probability[np.arange(len(y)), y].mean()


@settings(max_examples=60, derandomize=True)
@given(st.integers(1, 60), st.integers(1, 70), st.integers(2, 6), st.integers(0, 1000))
def test_evaluation_equals_numpy(samples, batch_size, classes, seed):
    rng = np.random.default_rng(seed)
    weight, bias = rng.normal(size=(classes, 3)), rng.normal(size=classes)
    x, y = rng.normal(size=(samples, 3)), rng.integers(0, classes, samples)
    model = nn.Linear(3, classes)
    model.load_state_dict({"weight": torch.tensor(weight), "bias": torch.tensor(bias)})
    score = evaluate(
        model, torch.tensor(x).float(), torch.tensor(y), replace(CPU, eval_batch=batch_size)
    )
    accuracy, loss = numpy_score(weight, bias, x, y)
    assert score.accuracy == pytest.approx(accuracy, abs=1e-6)
    assert score.loss == pytest.approx(loss, rel=1e-4, abs=1e-5)
    logits = x.astype(np.float32) @ weight.T.astype(np.float32) + bias.astype(np.float32)
    counts = np.zeros((classes, classes), int)
    for truth, row in zip(y, logits, strict=True):
        counts[truth, row.argmax()] += 1
    assert score.confusion.tolist() == counts.tolist()
    assert score.confusion.trace() / samples == score.accuracy


class Fixed(nn.Module):
    """A model with given outputs."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.tensor(logits)

    def forward(self, x):
        return self.logits[: len(x)]


def test_nonfinite_logits_are_wrong():
    """argmax alone treats NaN as the largest, and selects the first class in constant rows."""
    nan, inf = float("nan"), float("inf")
    rows = [
        [nan, nan, nan], [nan, 1.0, 2.0], [inf, 1.0, 2.0], [inf, inf, inf], [-inf, -inf, -inf],
        [3.0, -inf, -inf], [3.0, 1.0, 2.0], [1.0, 1.0, nan],
    ]  # fmt: skip
    x, y = torch.zeros(len(rows), 1), torch.zeros(len(rows), dtype=torch.int64)
    score = evaluate(Fixed(rows), x, y, CPU)
    assert score.accuracy == 2 / 8, "the masked one and the sound one"
    assert score.confusion.tolist() == [[2, 0, 0], [0, 0, 0], [0, 0, 0]]


def test_confusion_matrix_has_a_limit_of_classes():
    x, y = torch.zeros(2, 1), torch.tensor([0, 3])
    assert evaluate(Fixed(np.eye(2, 200)), x, y, CPU).confusion.shape == (200, 200)
    assert evaluate(Fixed(np.eye(2, 201)), x, y, CPU).confusion is None


class Seen(nn.Module):
    """A linear layer with a wide output, which records its batch sizes."""

    def __init__(self, width):
        super().__init__()
        self.wide, self.narrow, self.sizes = nn.Linear(3, width), nn.Linear(width, 2), []

    def forward(self, x):
        self.sizes.append(len(x))
        return self.narrow(self.wide(x))


@pytest.mark.parametrize(
    ("width", "batch"),
    [(8, 1024), (2048, 1024), (2049, 1023), (16384, 128), (32768, 64), (200_000, 32)],
)
def test_batch_of_evaluation_keeps_the_largest_activation_within_8_mib(width, batch):
    model = Seen(width)
    assert evaluation_batch(model, torch.ones(5, 3), CPU) == batch
    assert model.sizes == [1]
    assert evaluation_batch(model, torch.ones(5, 3), replace(CPU, eval_batch=7)) == 7
    assert not any(part._forward_hooks for part in model.modules())


def test_evaluation_batches_are_twice_as_large_in_bfloat16():
    half = replace(CPU, autocast_dtype=torch.bfloat16)
    assert evaluation_batch(Seen(32768), torch.ones(5, 3), half) == 128


def test_evaluation_uses_batches_of_that_size():
    model = Seen(32768)
    evaluate(model, torch.ones(150, 3), torch.zeros(150, dtype=torch.long), CPU)
    assert model.sizes == [1, 64, 64, 22]
    model.sizes.clear()
    assert logits_of(model, torch.ones(150, 3), CPU).shape == (150, 2)
    assert model.sizes == [1, 64, 64, 22]


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_changes_nothing(training):
    model = small_net(dropout=0.5).train(training)
    x, y = data()
    model(x)
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    first, second = evaluate(model, x, y, CPU), evaluate(model, x, y, replace(CPU, eval_batch=1))
    assert model.training is training
    assert all(module.training is training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state), "dropout did not draw"
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    # Batch normalization by its running statistics: a batch of one is scored like any other.
    assert first.accuracy == second.accuracy
    assert first.loss == pytest.approx(second.loss, rel=1e-5)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_module_in_evaluation_mode_stays_there():
    """A frozen extractor in a model that trains: its statistics must not change."""
    model = small_net().train()
    model[1].eval()
    evaluate(model, *data(), CPU)
    assert model.training
    assert not model[1].training


def test_failed_evaluation_restores_the_mode():
    model = small_net().train()
    with pytest.raises(RuntimeError):
        evaluate(model, torch.zeros(4, 5), torch.zeros(4, dtype=torch.long), CPU)
    assert model.training
    assert model[1].training


# --- devices and precision ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tpu", "", "CPU", "cpu:1", "cuda:99", "cuda:-1", "cuda:x", "gpu"])
def test_missing_device_raises(name):
    with pytest.raises(SettingsError) as caught:
        find_device(name)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert repr(name) in message
    assert "engine.device" in message
    for there in ("auto", *available_devices()):
        assert there in message
    with pytest.raises(SettingsError, match=r"engine\.device"):
        compute_for(ComputeSettings(device=name))


@pytest.fixture
def two_gpus(monkeypatch):
    # The compiler's import reads these functions, and fails if they are patched by then.
    importlib.import_module("torch._dynamo.variables")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)


@pytest.mark.usefixtures("two_gpus")
def test_devices_of_a_machine_with_gpus():
    assert available_devices() == ["cpu", "cuda", "cuda:0", "cuda:1"]
    assert find_device("auto").type == "cuda"
    assert find_device("cuda:1") == torch.device("cuda:1")
    assert find_device("cpu") == torch.device("cpu")
    with pytest.raises(SettingsError, match=r"'cuda:2'.*cpu, cuda, cuda:0, cuda:1"):
        find_device("cuda:2")
    compute = compute_for(ComputeSettings())
    assert (compute.device.type, compute.autocast_dtype) == ("cuda", torch.bfloat16)
    assert compute.channels_last
    assert compute_for(ComputeSettings(precision="float16")).autocast_dtype is torch.float16
    assert compute_for(ComputeSettings(precision="float32")).autocast_dtype is None
    assert not compute_for(ComputeSettings(channels_last="false")).channels_last


@pytest.mark.usefixtures("two_gpus")
def test_gpu_without_bfloat16_computes_in_float32(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    assert compute_for(ComputeSettings()).autocast_dtype is None


@pytest.mark.usefixtures("no_gpu")
def test_devices_without_gpus():
    assert available_devices() == ["cpu"]
    found = compute_for(ComputeSettings())
    assert (found.device.type, found.autocast_dtype, found.channels_last) == ("cpu", None, True)
    assert not compute_for(ComputeSettings(channels_last="false")).channels_last
    for name in ("cuda", "cuda:0", "mps"):
        with pytest.raises(SettingsError, match=rf"'{name}'.*cpu"):
            find_device(name)


@pytest.mark.usefixtures("no_gpu")
def test_mac_uses_mps(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert find_device("auto") == find_device("mps") == torch.device("mps")
    assert compute_for(ComputeSettings()).autocast_dtype is None
    assert not compute_for(ComputeSettings()).channels_last


@pytest.mark.parametrize(
    ("has", "chosen"),
    [
        ({"amx_bf16": True, "avx512_bf16": True}, "bfloat16"),
        ({"amx_bf16": False, "avx512_bf16": True}, "float32"),
        ({}, "float32"),
    ],
)
@pytest.mark.usefixtures("no_gpu")
def test_auto_precision_on_a_cpu(monkeypatch, has, chosen):
    """The fast format on a CPU is bfloat16 with AMX; with AVX-512 alone, it gains too little."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has, raising=False)
    dtype = compute_for(ComputeSettings()).autocast_dtype
    assert dtype is (torch.bfloat16 if chosen == "bfloat16" else None)
    found = resolve_precision(EngineSettings())
    assert (found.precision, found.channels_last) == (chosen, "true")
    kept = resolve_precision(EngineSettings(precision="bfloat16", channels_last="false"))
    assert (kept.precision, kept.channels_last) == ("bfloat16", "false")
    assert resolve_precision(found) == found


@pytest.mark.parametrize("device", ["cpu", "auto"])
@pytest.mark.usefixtures("no_gpu")
def test_float16_on_a_cpu_raises(device):
    with pytest.raises(SettingsError) as caught:
        compute_for(ComputeSettings(device=device, precision="float16"))
    for part in ("engine.precision", "'float16'", "cpu", "float32", "bfloat16"):
        assert part in str(caught.value)


def test_bfloat16_trains_on_a_cpu():
    compute = compute_for(ComputeSettings(device="cpu", precision="bfloat16"))
    assert compute.autocast_dtype is torch.bfloat16
    seen = []
    model = small_net()
    model[4].register_forward_hook(lambda _module, _x, output: seen.append(output.dtype))
    model, losses = trained(RUNS["adam"], epochs=10, compute=compute, model=model)
    assert set(seen) == {torch.bfloat16}
    assert losses[-1] < 0.8 * losses[0]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    exact, _ = trained(RUNS["adam"], epochs=10)
    assert not torch.equal(exact[0].weight, model[0].weight)
    mixed, plain = evaluate(model, *data(), compute), evaluate(model, *data(), CPU)
    assert mixed.loss == pytest.approx(plain.loss, rel=0.05)
    assert mixed.loss != plain.loss


def test_memory_format_is_set():
    last = Compute(torch.device("cpu"), channels_last=True)
    images = torch.randn(3, 5, 4, 6)
    assert last.to_inputs(images).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(last.to_inputs(images), images)
    assert torch.equal(last.to_inputs(torch.ones(3, 7)), torch.ones(3, 7))
    assert CPU.to_inputs(images).is_contiguous()
    conv = nn.Conv2d(5, 2, 3)
    last.place(conv)
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    last.place(nn.Linear(2, 3))


def test_large_weights_keep_their_memory_format_on_cpus_alone():
    for device, has_changed in (("cpu", False), ("meta", True)):
        large = nn.Conv2d(128, 65, 2, device=device)
        Compute(torch.device(device), channels_last=True).place(large)
        assert large.weight.is_contiguous(memory_format=torch.channels_last) == has_changed


# --- seeds ----------------------------------------------------------------------------------

paths = st.lists(st.one_of(st.integers(-(10**20), 10**20), st.text(max_size=8)), max_size=4)


@settings(max_examples=400, derandomize=True)
@given(st.integers(0, 3), paths, st.integers(0, 3), paths)
def test_derived_seeds_differ_for_different_paths(seed, names, other_seed, others):
    one, two = derive(seed, *names), derive(other_seed, *others)
    assert 0 <= one < 2**63
    assert (one == two) == ((seed, names) == (other_seed, others))


def test_derived_seeds_differ_for_similar_paths():
    alike = [
        (0,), (0, ""), (0, "", ""), (0, "1"), (0, 1), (1,), (1, 0), (0, "12"), (0, "1", "2"),
        (0, 1, 2), (0, 12), (0, "str:1"), (0, "int:1"), (0, "a", "b"), (0, "b", "a"), (0, "ab"),
        (0, "a:b"), (0, "A", "b"), (0, "é"), (0, "e\u0301"), (10, "a"), (1, "0a"), (-1,), (0, -1),
        (0, "a\x1fstr:b"),
    ]  # fmt: skip
    assert len({derive(*path) for path in alike}) == len(alike)


def test_seeds_are_spread_out():
    drawn = np.array([derive(0, "client", number) for number in range(4000)], dtype=np.float64)
    share = drawn / 2**63
    assert abs(share.mean() - 0.5) < 0.03
    assert abs(share.std() - 12**-0.5) < 0.02
    assert {derive(0, n) % 2 for n in range(20)} == {0, 1}


def test_seeds_are_the_same_in_any_process():
    script = (
        "import torch; from fedhet.base.seeding import *\n"
        "torch.manual_seed(99); torch.rand(7)\n"
        "print(derive(7, 'client-3', 7, 'batches'), derive(0), derive(0, 'ü', -5))\n"
        "print(torch.rand(2, generator=torch_generator(3, 'a')).tolist())\n"
        "print(numpy_rng(3, 'a').integers(0, 10**9, 3).tolist())\n"
        "with seeded(5, 'model', 'mlp'): print(torch.rand(3).tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True,
        env={"PYTHONHASHSEED": "12345", "PATH": "", "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    with seeded(5, "model", "mlp"):
        drawn = torch.rand(3).tolist()
    expected = [
        f"{derive(7, 'client-3', 7, 'batches')} {derive(0)} {derive(0, 'ü', -5)}",
        str(torch.rand(2, generator=torch_generator(3, "a")).tolist()),
        str(numpy_rng(3, "a").integers(0, 10**9, 3).tolist()),
        str(drawn),
    ]
    assert done.stdout.splitlines() == expected


def test_seeded_restores_the_global_generator():
    torch.manual_seed(1)
    undisturbed = torch.rand(3)
    torch.manual_seed(1)
    with seeded(5, "x"):
        inside = torch.rand(3)
        with seeded(5, "y"):
            nested = torch.rand(3)
        after = torch.rand(3)
    assert torch.equal(torch.rand(3), undisturbed)
    with seeded(5, "x"):
        assert torch.equal(torch.rand(6), torch.cat([inside, after]))
    assert not torch.equal(inside, nested)


def draw_and_fail():
    torch.rand(3)
    raise ZeroDivisionError


def test_seeded_restores_the_generator_after_an_error():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), seeded(5, "x"):
        draw_and_fail()
    assert torch.equal(torch.get_rng_state(), before)


def test_generators_do_not_touch_global_state():
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    torch.rand(3, generator=torch_generator(0, "a"))
    numpy_rng(0, "a").normal(size=3)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)


# --- compiled steps -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="compiling needs a C++ compiler")
def test_compiled_steps_equal_plain_steps():
    x, y = torch.rand(50, 1, 8, 8, generator=generator()), torch.arange(50) % 3
    trained = []
    for compute in (CPU, compute_for(ComputeSettings(device="cpu", compile=True))):
        model = build("mlp", (1, 8, 8), 3, seed=0).train()
        loss_of = CrossEntropy(model)
        optimizing = optimization_for(model.parameters(), TrainingSettings(), compute)
        options = {"epochs": 2, "batch_size": 16, "generator": generator(), "compute": compute}
        loss = train_epochs(x, y, loss_of, optimizing, **options)
        trained.append((loss, model.state_dict()))
    (loss, plain), (again, compiled) = trained
    assert again == pytest.approx(loss, rel=1e-4)
    for name, tensor in plain.items():
        torch.testing.assert_close(compiled[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "compiles"),
    [({}, False), ({"compile": True}, True), ({"compile": True, "epsilon": 8.0}, False)],
)
def test_local_training_is_compiled_if_set(tmp_path, monkeypatch, settings, compiles):
    """Training with DP-SGD is not compiled, because compiled networks do not call its hooks."""
    found = []
    monkeypatch.setattr(torch, "compile", lambda module, mode: found.append(module) or module)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    run(small("fedavg", models=["mlp"], rounds=1, **settings), tmp_path)
    assert bool(found) == compiles
    assert all(isinstance(module, nn.Module) for module in found)


def test_missing_compiler_raises(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SettingsError, match=r"engine\.compile"):
        compute_for(ComputeSettings(device="cpu", compile=True))


def test_channels_last_format_applies_only_to_two_dimensional_convolutions():
    """PyTorch rejects the format for the weights of 3D convolutions."""
    flat, deep = nn.Conv2d(3, 4, 3), nn.Conv3d(1, 2, 3)
    weights = [each.weight.detach().clone() for each in (flat, deep)]
    replace(compute_for(ComputeSettings(device="cpu")), channels_last=True).place(
        nn.ModuleList([flat, deep])
    )
    assert flat.weight.is_contiguous(memory_format=torch.channels_last)
    assert deep.weight.is_contiguous()
    assert all(map(torch.equal, (flat.weight, deep.weight), weights))


EPOCHS = {
    "fedavg": ({}, [12, 12]),
    "half of the clients": ({"method": "fedavg", "fraction": 0.5, "rounds": 3}, [6, 6, 6]),
    "labeled and unlabeled samples": ({"method": "fedavg", "semi": "fixmatch"}, [12, 12]),
    "two models": ({"method": "fml"}, [12, 12]),
    "a global and a personal model": ({"method": "ditto"}, [24, 24]),
    "two epochs of the personal model": (
        {"method": "ditto", "ditto.personal-epochs": 2},
        [20, 20],
    ),
    "two epochs of the head before the local epochs": (
        {"method": "fedrep", "fedrep.head-epochs": 2},
        [20, 20],
    ),
    "a third of the samples in each epoch": (
        {"method": "fedtype", "fedtype.epoch-data": "part"},
        [4, 4],
    ),
    "four steps on each batch": ({"method": "pfedme", "pfedme.steps": 4}, [48, 48]),
    "own training after the last round, and public data": (
        {"method": "fedmd", "data.public-fraction": 0.2, "fedmd.digest-epochs": 2},
        [12, 24],
    ),
    "own and public samples together": (
        {"method": "cronus", "data.public-fraction": 0.2},
        [12, 24],
    ),
    "update training": (
        {"method": "cofed", "data.public-fraction": 0.2, "cofed.update-epochs": 2},
        [12, 8],
    ),
}
"""Settings, and the epochs of four clients with three local epochs, by round."""


@pytest.mark.parametrize("case", EPOCHS)
def test_records_count_the_passes_over_the_clients_own_samples(case, tmp_path):
    changes, expected = EPOCHS[case]
    method = changes.get("method", case)
    usual = {"models": ["mlp"], "local_epochs": 3}
    with without_figures():
        run(small(**{"method": method, **usual, **changes}), tmp_path / "run")
    assert [each["epochs"] for each in records(tmp_path / "run")] == expected


def test_warm_up_of_um_pfssl_is_counted(tmp_path):
    """All four clients have four epochs before round 1; then, two clients are sampled."""
    own = {"um-pfssl.warm-up": 4, "um-pfssl.warm-up-steps": 0, "fraction": 0.5, "rounds": 3}
    config = small("um-pfssl", models=["cnn2-dropout"], local_epochs=3, **own)
    with without_figures():
        run(config, tmp_path / "run")
    total = sum(each.get("epochs", 0) for each in records(tmp_path / "run"))
    sampled = [name for each in records(tmp_path / "run") for name in each["asked"]]
    assert total == 4 * 4 + 3 * 2 * (config.run.rounds - 1), sampled
