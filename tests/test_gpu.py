"""All features on a GPU, here on a simulated GPU that rejects what CUDA rejects.

`benchmarks/pretended_gpu.py` explains the simulation and its limits.
"""

import gc
import os

import numpy as np
import pytest
import torch
from federation import Server, client_of, fast, records, run, small
from interruption import Notices, cut_and_resumed
from safetensors.torch import load_file
from torch.nn import functional as F

import fedhet
from benchmarks.pretended_gpu import pretended
from fedhet.algorithms.conformal import running_sums
from fedhet.base.errors import FedhetError, SettingsError
from fedhet.base.transfer import Numbers, all_to_device, joined, separated
from fedhet.cli.example import write_example
from fedhet.client_runtime.node import close_clients
from fedhet.data.store import RunData
from fedhet.engines.gpu_memory import gpu_fraction, training_bytes, with_gpu_share
from fedhet.kinds import IMAGE
from fedhet.learning.devices import compute_for, find_device
from fedhet.methods.registry import find_method, method_names
from fedhet.models import build
from fedhet.privacy.noise import Grid, SecretNoise
from fedhet.report import load_run
from fedhet.settings.engine import ComputeSettings

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None, reason="PyTorch without CUDA has no list of its kernels"
)
ORDINARY = {"felo", "fedtype", "fixmatch", "private"}


def slow_but_for_some(names):
    """Return test parameters, of which all but the ordinary ones are marked slow."""
    return [pytest.param(n, marks=[] if n in ORDINARY else [pytest.mark.slow]) for n in names]


@pytest.fixture
def gpu():
    with pretended() as device:
        yield device


def on_gpu(method, **changes):
    """Return the settings of a small federation on the GPU."""
    synthetic = {"velo.min-separation": 0} if method == "velo" else {}
    usual = {"clients": 3, "max_samples": 240, **fast(method), **synthetic, **changes}
    return small(method, device="cuda", **usual)


def finished(config, directory, gpu):
    """Run a federation, and check that it used the GPU and that no client failed."""
    summary = run(config, directory)
    assert gpu.total("launch") > 100
    assert all(record["failed"] == {} for record in records(directory))
    return summary


# The pretended device itself.

REFUSED = {
    "a tensor of the processor": lambda x: x + torch.ones(4),
    "... as a weight": lambda x: F.linear(x, torch.ones(2, 4)),
    "... among several": lambda x: torch.cat([x, torch.ones(4)]),
    "... as a mask": lambda x: torch.where(torch.ones(4) > 0, x, x),
    "... as an index of gather": lambda x: x.gather(0, torch.zeros(2, dtype=torch.int64)),
    "... to write to": lambda x: torch.ones(4).add_(x),
    "an index of the GPU": lambda x: torch.ones(4)[x.long()],
    "a generator of the processor": lambda x: torch.rand(2, device="cuda", generator=x.drawn),
    "more memory than there is": lambda x: torch.empty(2**33, device="cuda"),
    "an array": lambda x: x.numpy(),
    "an array by its protocol": lambda x: np.asarray(x),
}


@pytest.mark.parametrize("what", REFUSED)
def test_invalid_cuda_calls_raise(gpu, what):
    x = torch.ones(4, device="cuda")
    x.drawn = torch.Generator()
    with pytest.raises((RuntimeError, TypeError), match=r"device|memory|cuda"):
        REFUSED[what](x)


def test_valid_cuda_calls_succeed(gpu):
    x = torch.arange(4.0).to("cuda")
    assert x.is_cuda
    assert (x * torch.tensor(2.0))[torch.tensor([1, 3])].tolist() == [2.0, 6.0]
    x[1:3].add_(1)
    assert x.tolist() == [0, 2, 3, 3]
    weight = torch.ones(2, 4, device="cuda", requires_grad=True)
    F.linear(x, weight).sum().backward()
    assert weight.grad.cpu().tolist() == [[0, 2, 3, 3]] * 2
    with torch.autocast("cuda", torch.bfloat16):
        assert F.linear(x, weight).dtype is torch.bfloat16


def test_launches_copies_and_waits_are_counted(gpu):
    x = torch.ones(4).to("cuda")
    (x + 1).sum().item()
    x.to("cpu")
    torch.ones(2).to("cuda", non_blocking=True)
    found = [gpu.total(kind) for kind in ("launch", "up, waiting", "up", "down, waiting", "wait")]
    assert found == [2, 1, 1, 1, 1]


def test_memory_is_counted_and_released():
    with pretended(memory=10_000_000) as gpu:
        free = gpu.free()
        x = torch.ones(500_000, device="cuda")
        y = x.view(2, -1)
        del x
        assert free - gpu.free() == 2_000_000
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            torch.ones(2_500_000, device="cuda")
        assert y.sum().item() == 500_000
        del y
        assert gpu.free() == free


# What is moved, and what is waited for.


def test_tensors_of_one_type_are_copied_together(gpu):
    tensors = {f"w{k}": torch.randn(k + 1, 3) for k in range(5)}
    tensors |= {"count": torch.tensor(7), "bytes": torch.arange(9, dtype=torch.uint8)}
    tensors["turned"] = torch.randn(3, 4, 2, 2).to(memory_format=torch.channels_last)
    there = all_to_device(tensors, torch.device("cuda"))
    assert gpu.total("up") == 3
    back = all_to_device(there, torch.device("cpu"))
    assert gpu.total("down, waiting") == 3
    assert gpu.total("up, waiting", "wait") == 0
    for name, tensor in tensors.items():
        assert there[name].is_cuda
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)
    assert all_to_device(there, torch.device("cuda"))["w1"].data_ptr() == there["w1"].data_ptr()
    assert gpu.total("up") == 3


def test_flattened_terms_have_the_same_gradients(gpu):
    host = [torch.randn(2, 3), torch.randn(4), torch.randn(())]
    there = [each.to("cuda").requires_grad_() for each in host]
    parts = separated([2 * each**3 for each in joined(there)], there)
    sum((k + 1) * part.sum() for k, part in enumerate(parts)).backward()
    for k, (own, each) in enumerate(zip(there, host, strict=True)):
        assert parts[k].shape == each.shape
        assert torch.allclose(own.grad.cpu(), (k + 1) * 6 * each**2)
    assert joined(host)[1] is host[1]


def test_host_draws_the_same_numbers_for_every_device(gpu):
    def drawn(device):
        generator = torch.Generator().manual_seed(3)
        numbers = Numbers(lambda n: torch.rand(n, generator=generator), torch.device(device))
        return [numbers.take(count).cpu() for count in (3, 4000, 200, 5000, 1)]

    for one, other in zip(drawn("cuda"), drawn("cpu"), strict=True):
        assert torch.equal(one, other)
    assert gpu.total("up") == 3


def test_privacy_noise_equals_that_of_the_host(gpu):
    """The bits are drawn on the host and copied; the device computes the Gaussians."""
    key, values, grid = bytes(range(32)), torch.arange(-500, 501), Grid(1.0, 1001)
    host = SecretNoise(key).add([values], 1.5, grid)[0]
    copies = gpu.total("up, waiting")
    there = values.cuda()
    found = SecretNoise(key).add([there], 1.5, grid)[0]
    assert gpu.total("up, waiting") == copies + 2, "the values, and the bits"
    assert gpu.total("down, waiting") == 0
    assert found.device.type == "cuda"
    assert torch.allclose(found.cpu(), host, atol=1e-6)


@pytest.mark.parametrize("method", slow_but_for_some(method_names()))
def test_no_batch_waits(tmp_path, gpu, method):
    """The number of synchronizations does not depend on the number of batches."""
    waits = []
    for batch in (40, 8):
        gpu.counts.clear()
        config = on_gpu(method, clients=2, **{"training.batch-size": batch})
        finished(config, tmp_path / str(batch), gpu)
        waits.append(gpu.total("wait", "up, waiting", "down, waiting"))
    assert waits[0] == waits[1]


# Where samples and models are.


def settled(x, sample_mb, memory, y=None):
    with pretended(memory=memory):
        compute = compute_for(ComputeSettings(device="cuda", sample_mb=sample_mb))
        parts = compute.fit_on_device(*([x] if y is None else [x, y]))
        return [part.is_cuda for part in parts]


def test_samples_stay_on_the_gpu_if_they_fit():
    close_clients()
    gc.collect()  # Samples of earlier tests count as long as they are alive.
    x, y = torch.zeros(3 * 2**20, dtype=torch.uint8), torch.zeros(2 * 2**20, dtype=torch.uint8)
    assert settled(x, 4, 2**30) == [True]
    assert settled(x, 2, 2**30) == [False]
    assert settled(x, 4, 5 * 2**20) == [False]  # more than half of it
    assert settled(x, 4, 2**30, y) == [False, False]  # both, or none
    with pretended():
        compute = compute_for(ComputeSettings(device="cuda", sample_mb=4))
        (first,) = compute.fit_on_device(x)
        assert compute.fit_on_device(y)[0].is_cuda is False  # the first one takes 3 of the 4 MB
        del first
        assert compute.fit_on_device(y)[0].is_cuda


@pytest.mark.parametrize("method", slow_but_for_some(method_names()))
def test_metrics_do_not_depend_on_sample_placement(tmp_path, gpu, method):
    whole, none = (
        finished(on_gpu(method, sample_mb=mb), tmp_path / str(mb), gpu) for mb in (100, 0)
    )
    assert whole["accuracy"] == none["accuracy"]
    assert same_states(tmp_path / "100", tmp_path / "0")


def same_states(one, other):
    """Return whether all clients ended with bit-for-bit equal tensors."""
    states = [sorted(run.glob("state/*/*/round-000002.safetensors")) for run in (one, other)]
    pairs = list(zip(*states, strict=True))
    assert pairs
    return all(
        torch.equal(a[name], b[name])
        for a, b in ((load_file(left), load_file(right)) for left, right in pairs)
        for name in a
    )


def test_waiting_client_uses_no_gpu_memory(tmp_path, gpu):
    server = Server(on_gpu("felo", keep_optimizer=True, clients=2), tmp_path)
    for number in (1, 2):
        instructions, _ = server.play(number)
        for proxy, _ in instructions:
            state = client_of(proxy).state
            assert not any(tensor.is_cuda for tensor in state.held_tensors())
            assert client_of(proxy).samples.own.x.is_cuda


# When memory does not suffice.


@pytest.mark.slow  # alone: what other tests have left on the device decides how much is too little
def test_client_out_of_memory_is_called_alone(tmp_path):
    """Clients of an earlier run, whose samples are still on the GPU, release memory for it."""
    told, config = Notices(), on_gpu("local", models="mlp", clients=2, batch_size=200)
    gc.collect()  # what earlier tests have left on a device is no part of what this one needs
    with pretended() as gpu:
        close_clients()
        run(config, tmp_path / "free")
        needed = gpu.peak
        close_clients()
        run(on_gpu("local", models="mlp", clients=2, max_samples=1700), tmp_path / "earlier")
        left = gpu.memory - gpu.free()
        assert left > 300_000
        gpu.memory = needed + left // 2
        run(config, tmp_path / "run", [told])
    assert all(record["failed"] == {} for record in records(tmp_path / "run"))
    assert any("is called again without other clients" in text for text in told.texts)
    assert same_states(tmp_path / "free", tmp_path / "run")


def test_run_ends_if_no_client_fits_alone(tmp_path):
    config = on_gpu("local", models=["cnn2"], clients=2, batch_size=200)
    with pretended(memory=300_000), pytest.raises(FedhetError, match="client-0"):
        run(config, tmp_path / "run")
    fault = next(iter(records(tmp_path / "run")[0]["failed"].values()))
    assert "(CUDA out of memory" in fault
    assert "a smaller 'training.batch-size'" in fault


def test_gpu_fraction_follows_from_the_model_size():
    gib = 2**30
    assert gpu_fraction(needed=10 * gib, total=80 * gib) == 0.14  # seven times 10 of 72
    assert gpu_fraction(needed=gib // 2, total=80 * gib) == 0.12  # eight at most
    assert gpu_fraction(needed=50 * gib, total=80 * gib) == 1.0
    assert gpu_fraction(needed=500 * gib, total=80 * gib) == 1.0


@pytest.mark.parametrize("name", ["mlp", "cnn2", "resnet10"])
def test_training_memory_is_estimated(gpu, name):
    """The estimate is slightly above the peak of real training."""
    shape, batch = (3, 32, 32), 32
    model = build(name, shape, 10, seed=0)
    estimate = training_bytes(model, IMAGE, shape, batch)
    model.to("cuda")
    x, y = torch.randn(batch, *shape, device="cuda"), torch.zeros(batch, dtype=int, device="cuda")
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert 0.8 * gpu.peak < estimate < 3 * gpu.peak


@pytest.mark.parametrize(("gib", "share"), [(16, 0.12), (1, 1.0)])
def test_gpu_fraction_is_chosen_if_unset(gib, share):
    """CUDA itself uses half a GiB in each process."""
    config = on_gpu("fedtype")
    data = RunData.for_run(config.run)
    with pretended(memory=gib * 2**30):
        assert with_gpu_share(config, data).run.engine.gpus_per_client == share
        several = on_gpu("fedtype", batch_size=[8, config.run.training.batch_size])
        assert with_gpu_share(several, data).run.engine.gpus_per_client == share
        for given in ({"gpus_per_client": 0.5}, {"device": "cpu"}):
            chosen = config.replacing(engine=config.run.engine.model_copy(update=given))
            assert with_gpu_share(chosen, data) == chosen


# Messages on a machine without a GPU

DRIVERS = {
    "Found no NVIDIA driver on your system. Please check that you have one": (
        "Found no NVIDIA driver on your system)"
    ),
    "The NVIDIA driver on your system is too old (found version 11040). Please update": (
        "The NVIDIA driver on your system is too old (found version 11040); PyTorch"
    ),
}


@pytest.mark.parametrize("said", DRIVERS)
def test_missing_gpu_has_a_reason(monkeypatch, said):
    def fail():
        raise RuntimeError(said)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "_lazy_init", fail)
    with pytest.raises(SettingsError) as caught:
        find_device("cuda")
    line = str(caught.value)
    assert line.startswith(f"device 'cuda' not found on this machine ({DRIVERS[said]}")
    assert line.endswith("to auto or one of cpu.")
    assert "\n" not in line


def test_pytorch_without_cuda_raises(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(SettingsError, match="CUDA"):
        find_device("cuda:1")


def test_algorithms_are_deterministic_by_default(gpu):
    compute_for(ComputeSettings(device="cuda", deterministic=False))
    assert not torch.are_deterministic_algorithms_enabled()
    values = torch.rand(3, 5, device="cuda")
    values.cumsum(1)
    compute_for(ComputeSettings(device="cuda"))
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    with pytest.raises(RuntimeError, match="cumsum does not have a deterministic implementation"):
        values.cumsum(1)
    assert torch.allclose(running_sums(values).cpu(), values.cpu().cumsum(1))


# What runs on it.


@pytest.mark.parametrize("method", slow_but_for_some(method_names()))
def test_every_method_agrees_with_the_cpu(tmp_path, gpu, method):
    found = finished(on_gpu(method), tmp_path / "gpu", gpu)
    config = on_gpu(method)
    plain = run(
        config.replacing(engine=config.run.engine.model_copy(update={"device": "cpu"})),
        tmp_path / "cpu",
    )
    kind = find_method(method).spec.kinds[0]
    protocol = next(iter(plain["accuracy"]))
    there, here = (each["accuracy"][protocol][kind]["mean"] for each in (found, plain))
    assert there == pytest.approx(here, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "signal", "table"])
@pytest.mark.parametrize("method", ["felo", "fedtype"])
def test_texts_signals_and_tables_agree_with_the_cpu(tmp_path, gpu, method, kind):
    write_example(kind, tmp_path / "data")
    models = {"text": "text-cnn,text-gru", "signal": "signal-cnn2,signal-gru"}.get(kind, "mlp,mlp2")
    settings = {
        "data.dataset": f"{kind}:{tmp_path / 'data'}",
        "data.min-samples": 5,
        "models": models.split(","),
        "fedtype.proxy": models.split(",")[1],
    }
    if method != "fedtype":
        del settings["fedtype.proxy"]
    if kind == "table":
        settings["data.target"] = "outcome"
    finished(on_gpu(method, max_samples=120, **settings), tmp_path / "run", gpu)


WAYS = {
    "fixmatch": ("fedavg", {"semi": "fixmatch", "semi_threshold": 0.2}),
    "randaugment": ("felo", {"augment": "randaugment"}),
    "optimizer kept": ("felo", {"keep_optimizer": True, "schedule": "plateau"}),
    "momentum, clipped": ("fedprox", {"optimizer": "sgd", "momentum": 0.9, "clip": 1.0}),
    "private": ("fedavg", {"privacy.epsilon": 50.0, "models": ["mlp"]}),
    "paf": ("fedgems", {"attack": "paf"}),
    "lie": ("fedmd", {"attack": "lie"}),
    "ofom": ("fedavg", {"attack": "ofom"}),
    "metrics": ("felo", {"metrics": ["auc", "macro-f1", "test-loss", "calibration-error"]}),
    "one client's classes": ("felo", {"data.partition": "shards"}),
    "bfloat16": ("fedtype", {"precision": "bfloat16"}),
    "float16": ("felo", {"precision": "float16"}),
    "classical models": ("local", {"models": ["sk-tree", "mlp"]}),
}


@pytest.mark.parametrize("way", slow_but_for_some(WAYS))
def test_training_and_evaluation_variants_agree_with_the_cpu(tmp_path, gpu, way):
    method, changes = WAYS[way]
    finished(on_gpu(method, **changes), tmp_path / "run", gpu)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["felo", "fedtype", "fedgems", "um-pfssl"])
def test_interrupted_run_is_resumed(tmp_path, gpu, method):
    changes = {"rounds": 3, "keep_optimizer": True}
    cut_and_resumed(on_gpu(method, **changes), tmp_path, 2, "after")


def test_trained_model_predicts_and_is_exported(tmp_path, gpu):
    finished(on_gpu("felo"), tmp_path / "run", gpu)
    result = fedhet.Result(load_run(tmp_path / "run"))
    x = np.zeros((5, 1, 8, 8), np.float32)
    found = result.predict("client-0", x)
    assert found.probabilities.shape == (5, 10)
    result.export("client-0", tmp_path / "model.safetensors")
    result.export("client-0", tmp_path / "model.pt2")
    assert {path.name for path in tmp_path.glob("model.*")} >= {"model.safetensors", "model.pt2"}
