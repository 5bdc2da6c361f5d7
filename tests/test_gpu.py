"""Everything runs on a GPU: here on one that is only pretended, which refuses what CUDA refuses.

`benchmarks/pretended_gpu.py` says how, and what it cannot show.
"""

import numpy as np
import pytest
import torch
from federation import records, run, small
from interruption import cut_and_resumed
from torch.nn import functional as F

import fedhet
from benchmarks.pretended_gpu import pretended
from fedhet.data.examples import write_example
from fedhet.methods.registry import find_method, method_names
from fedhet.report import load_run

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None, reason="PyTorch without CUDA has no list of its kernels"
)
FAST = {
    "fedgems": {"fedgems.server-model": "mlp"},
    "fedtype": {"fedtype.proxy": "mlp3"},
    "um-pfssl": {"um-pfssl.warm-up": 1, "um-pfssl.passes": 2},
    "velo": {"velo.epochs": 1, "velo.least-separation": 0},
    "fedgkt": {"fedgkt.server-epochs": 1},
}


ORDINARY = {"felo", "fedtype", "fixmatch", "private"}


def slow_but_for_some(names):
    """Return what to test one by one: all that is not ordinary in the slow tests."""
    return [pytest.param(n, marks=[] if n in ORDINARY else [pytest.mark.slow]) for n in names]


@pytest.fixture
def gpu():
    with pretended() as device:
        yield device


def on_gpu(method, **changes):
    """Return the settings of a small federation on the GPU."""
    usual = {"clients": 3, "max_samples": 240, **FAST.get(method, {}), **changes}
    return small(method, device="cuda", **usual)


def finished(config, directory, gpu):
    """Run a federation; it must have used the GPU, and no client may have failed."""
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
def test_what_cuda_refuses_is_refused(gpu, what):
    x = torch.ones(4, device="cuda")
    x.drawn = torch.Generator()
    with pytest.raises((RuntimeError, TypeError), match=r"device|memory|cuda"):
        REFUSED[what](x)


def test_what_cuda_takes_is_taken(gpu):
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


def test_memory_is_counted_and_given_back():
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


# What runs on it.


@pytest.mark.parametrize("method", slow_but_for_some(method_names()))
def test_every_method_gives_nearly_the_numbers_of_the_processor(tmp_path, gpu, method):
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
def test_texts_signals_and_tables(tmp_path, gpu, method, kind):
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
def test_ways_of_training_and_judging(tmp_path, gpu, way):
    method, changes = WAYS[way]
    finished(on_gpu(method, **changes), tmp_path / "run", gpu)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["felo", "fedtype", "fedgems", "um-pfssl"])
def test_a_cut_run_is_resumed(tmp_path, gpu, method):
    changes = {"rounds": 3, "keep_optimizer": True}
    cut_and_resumed(on_gpu(method, **changes), tmp_path, 2, "after")


def test_a_trained_model_predicts_and_is_exported(tmp_path, gpu):
    finished(on_gpu("felo"), tmp_path / "run", gpu)
    result = fedhet.Result(load_run(tmp_path / "run"))
    x = np.zeros((5, 1, 8, 8), np.float32)
    found = result.predict("client-0", x)
    assert found.probabilities.shape == (5, 10)
    result.export("client-0", tmp_path / "model.safetensors")
    result.export("client-0", tmp_path / "model.pt2")
    assert {path.name for path in tmp_path.glob("model.*")} >= {"model.safetensors", "model.pt2"}
