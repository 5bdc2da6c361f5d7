"""Requirements for every method: restored servers, reopened clients, and label spaces."""

import copy
import shutil

import numpy as np
import pytest
import torch
from federation import Server, client_of, fast, records, run, small, without_times
from flwr.common import parameters_to_ndarrays
from rounds import SPACES, clients, inside_of, instruction_of, same, state_of

from fedhet.kinds import TABLE
from fedhet.methods.registry import find_method, method_names


def quick(method, **changes):
    """Return settings with which a federation of the method trains quickly."""
    usual = {"clients": 3, "max_samples": 240, "keep_optimizer": True, **fast(method)}
    return small(method, **{**usual, **changes})


def sent(server, number):
    """Return all instructions of a round, by client and name."""
    found = {}
    for instructions in server.instruct(number):
        knowledge = instruction_of(instructions)
        parts = {**knowledge.tensors, **knowledge.scalars}
        found |= {f"{instructions[0].name}: {name}": np.array(part) for name, part in parts.items()}
    return found


@pytest.mark.parametrize("method", method_names())
def test_restored_server_sends_and_forgets_identically(tmp_path, method):
    """The server rolls back to a checkpoint, as if no client could use its instructions."""
    server, other = (Server(quick(method), tmp_path / name) for name in ("one", "two"))
    server.play(1)
    fresh = sent(other, 1)
    other.strategy.init()
    other.strategy.load_state_dict(copy.deepcopy(server.strategy.state_dict()))
    if (pool := tmp_path / "one" / "pool").exists():  # models that a checkpoint leaves on disk
        shutil.copytree(pool, tmp_path / "two" / "pool", dirs_exist_ok=True)
    assert same(other.strategy.state_dict(), server.strategy.state_dict())
    assert same(sent(other, 2), sent(server, 2))
    assert same(fresh, sent(server, 2)) == (method in {"local", "central"})
    for each in (server, other):
        each.strategy.forget("client-1")
        each.strategy.forget("nobody")
    assert same(sent(other, 3), sent(server, 3))


@pytest.mark.parametrize("method", method_names())
def test_reopened_client_repeats_its_last_round(tmp_path, method):
    """Reopen the client from its state on disk, as in a new process."""
    config = quick(method)
    server = Server(config, tmp_path)
    server.play(1)
    instructions = server.instruct(2)
    ((proxy, ins), (_, result)) = (
        instructions[1 % len(instructions)],
        server.train(instructions)[1 % len(instructions)],
    )
    make = proxy.make_payload
    fresh = config.method.client(config, proxy._proxy._node)
    fresh.state.restore(server.log.run_name, before=2)
    message = make() if make else ins.parameters
    arrays, _, metrics = fresh.fit(parameters_to_ndarrays(message), {})
    assert "error" not in metrics
    for one, other in zip(arrays, parameters_to_ndarrays(result.parameters), strict=True):
        np.testing.assert_array_equal(one, other)
    for kind, model in client_of(proxy).models.items():
        assert same(state_of(fresh.models[kind]), state_of(model))


def heads(client):
    """Return the output layer's weights of each network of a client."""
    models = client.models or client.setup()
    return {kind: state_of(model)["classifier.weight"] for kind, model in models.items()}


OTHERS_TOO = {"felo", "velo", "fedgems", "fedrolex", "heterofl", "um-pfssl"}
"""Their loss is over all classes, or they start from a part of the server's model."""


@pytest.mark.parametrize("method", method_names())
def test_label_space_limits_gradients_and_predictions(tmp_path, method):
    """Own labels give no gradient to outputs for other classes.

    These classes are never predicted.
    """
    own = {"fedmd.public-epochs": 0} if method == "fedmd" else {}
    spec = find_method(method).spec
    model = spec.pool(TABLE)[0] if spec.client_model else "mlp"
    changes = {"models": model, "max_samples": 0, "keep_optimizer": False, **SPACES, **own}
    server = Server(quick(method, **changes), tmp_path)
    instructions = server.instruct(1)
    before = {proxy.name: heads(client_of(proxy)) for proxy, _ in instructions}
    server.train(instructions)
    for each in instructions:
        client = client_of(each[0])
        inside = inside_of(client)
        for kind, head in heads(client).items() if method not in OTHERS_TOO else ():
            moved = np.abs(head - before[client.info.name][kind]).sum(1)
            assert ((moved > 0) == inside).all(), kind
        for kind, model in client.eval_models(instruction_of(each)).items():
            logits = model.eval()(client.x[:3])
            assert torch.isinf(logits[:, torch.tensor(~inside)]).all(), kind
            assert torch.isfinite(logits[:, torch.tensor(inside)]).all(), kind


ALONE = {
    "felo": {"felo.alpha": 0.0, "felo.share-weights": False, "models": "cnn2"},
    "fedhe": {"fedhe.alpha": 0.0, "models": ["mlp", "cnn2"]},
    "fedproto": {"fedproto.lambda": 0.0, "models": "cnn2"},
    "fd": {"fd.gamma": 0.0, "models": ["mlp", "cnn2"]},
    "fedtgp": {"fedtgp.lambda": 0.0, "fedtgp.server-epochs": 1, "models": "cnn2"},
    "fml": {"fml.alpha": 1.0, "fml.meme": "cnn2", "models": ["mlp", "cnn2", "cnn3"]},
}
"""Without what they learn from the server; cnn2 has the width of features that Felo has."""


@pytest.mark.parametrize("method", ALONE)
def test_disabled_server_terms_equal_local_training(tmp_path, method):
    """The private models equal those of `local` bit for bit over three rounds."""
    usual = {"clients": 3, "local_epochs": 2}
    server = Server(small(method, **usual, **ALONE[method]), tmp_path / method)
    local = small("local", **usual, models=ALONE[method]["models"])
    alone = Server(local, tmp_path / "local")
    for number in (1, 2, 3):
        server.play(number)
        alone.play(number)
    others = clients(alone)
    for name, client in clients(server).items():
        assert same(state_of(client.network), state_of(others[name].network))


DIRICHLET = {"rounds": 6, "local_epochs": 2, "alpha": 0.5, "partition": "dirichlet"}
SKEWED = {"rounds": 3, "local_epochs": 3, "data.alpha": 0.5}
PUBLIC = {"rounds": 5, "local_epochs": 3, "max_samples": 500, "models": ["mlp", "cnn2"]}
LEARNS = [
    ("fedavg", DIRICHLET, {"personal/private": 0.75}),
    ("fedbn", DIRICHLET, {"personal/private": 0.75}),
    ("lg-fedavg", DIRICHLET, {"personal/private": 0.75}),
    ("fml", {**SKEWED, "models": ["mlp", "cnn2"], "fml.meme": "mlp"},
     {"personal/private": 0.7, "personal/proxy": 0.6}),
    ("fedgen", {**SKEWED, "models": ["mlp", "cnn2"]}, {"personal/private": 0.7}),
    ("fedkd", {**SKEWED, "models": ["mlp", "cnn2"], "fedkd.mentee": "mlp"},
     {"personal/private": 0.7, "personal/proxy": 0.6}),
    ("fedmrl", {**SKEWED, "models": ["mlp", "cnn2"], "fedmrl.shared": "mlp"},
     {"personal/private": 0.7, "personal/global": 0.6}),
    ("fedhe", {**SKEWED, "models": "mlp", "fedhe.loss": "mse"}, {"personal/private": 0.7}),
    ("fedhe", {**SKEWED, "models": "mlp", "fedhe.loss": "kl"}, {"personal/private": 0.7}),
    ("fedproto", {**SKEWED, "models": ["mlp", "cnn2"]},
     {"personal/private": 0.7, "personal/prototype": 0.7}),
    ("fd", {**SKEWED, "models": "mlp"}, {"personal/private": 0.7}),
    ("fedtgp", {**SKEWED, "models": ["mlp", "cnn2"]}, {"personal/private": 0.7}),
    ("fedgh", {**SKEWED, "models": ["mlp", "cnn2"]}, {"personal/private": 0.7}),
    ("fedre", {**SKEWED, "models": ["mlp", "cnn2"]}, {"personal/private": 0.7}),
    ("fedl2g", {**SKEWED, "models": ["mlp", "cnn2"]}, {"personal/private": 0.7}),
    ("fedl2g", {**SKEWED, "models": ["mlp", "cnn2"], "fedl2g.guide": "features"},
     {"personal/private": 0.7}),
    # More than a client alone, which knows 0.49 of the common test set here.
    ("fedmd", PUBLIC, {"common/private": 0.6}),
    ("ds-fl", {**PUBLIC, "ds-fl.server-model": "mlp"},
     {"common/private": 0.5, "common/server": 0.5}),
    ("cronus", PUBLIC, {"common/private": 0.45}),
    ("fccl", PUBLIC, {"common/private": 0.5}),
    ("kt-pfl", PUBLIC, {"common/private": 0.5}),
    ("rhfl", PUBLIC, {"common/private": 0.5}),
]  # fmt: skip


ORDINARY = {"fedavg", "fedkd", "fedproto", "ds-fl"}
"""They average weights, learn from a second model, from classes, and from public samples."""


@pytest.mark.parametrize(
    ("method", "changes", "bounds"),
    [pytest.param(*a, marks=[] if a[0] in ORDINARY else pytest.mark.slow) for a in LEARNS],
)
def test_run_learns(tmp_path, method, changes, bounds):
    found = run(small(method, clients=3, **changes), tmp_path / "run")["accuracy"]
    assert set(found["personal"]) == set(find_method(method).spec.kinds)
    for place, bound in bounds.items():
        protocol, kind = place.split("/")
        assert found[protocol][kind]["mean"] > bound, place
    if method == "fedavg":
        assert found["common"]["global"]["mean"] > found["common"]["private"]["mean"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", method_names())
def test_ray_gives_the_metrics_of_inline(tmp_path, method):
    """Use models of any kind if the method supports them, and sample half of the clients."""
    models = {"cofed": ["mlp", "sk-tree", "sk-svm", "cnn2"], "local": ["mlp", "sk-tree"]}.get(
        method, []
    )
    pool = {"models": models} if models else {}
    inline, ray = (
        run(quick(method, clients=4, fraction=0.5, backend=b, **pool), tmp_path / b)
        for b in ("inline", "ray")
    )
    assert without_times(inline) == without_times(ray)
    numbers = [[record["method"] for record in records(tmp_path / b)] for b in ("inline", "ray")]
    assert numbers[0] == numbers[1]
