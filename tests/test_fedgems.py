"""FedGEMS against Algorithm 1, transcribed here in plain torch; and what travels."""

import numpy as np
import pytest
import torch
from federation import Server, records, run, small, without_times
from flwr.common import parameters_to_ndarrays
from torch.nn import functional as F

from fedhet.client.cache import open_client
from fedhet.client.node import read_node
from fedhet.data import DataSpec, client_data, common_test, public_set
from fedhet.data.site import site_data
from fedhet.errors import DataError, KnowledgeError, SettingsError, StateError
from fedhet.models import build
from fedhet.seeding import torch_generator
from fedhet.training import batches
from fedhet.wire.knowledge import Knowledge, decode

FEW = {"fedgems.server-model": "mlp2", "models": "mlp", "max_samples": 300, "batch_size": 16}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def fedgems(**changes):
    return small("fedgems", **{**FEW, **changes})


def said(parameters):
    return decode(parameters_to_ndarrays(parameters), "test")[1].tensors


def client_of(server, proxy):
    config = server.strategy.log.config
    number = int(proxy.name.removeprefix("client-"))
    node_config = {"partition-id": number, "num-partitions": config.run.clients}
    directory = server.log.directory / "state"
    return open_client(config, read_node(node_config, config.run, str(directory)))


def play(server, number):
    """Run a round; return what was asked and answered."""
    asked = server.ask(number)
    answers = server.answers(asked)
    server.strategy.aggregate_fit(number, answers, [])
    return asked, answers


# --- the server -----------------------------------------------------------------------------


def softmax_kl(teacher, own):
    p = torch.softmax(teacher, 0)
    return torch.sum(p * (torch.log(p) - torch.log_softmax(own, 0)))


def reference_lesson(logits, label, selective):
    """Eq. 3 and 4 for one sample: what clients' logits [K, C] teach, or None."""
    if not selective:
        return logits.mean(0)
    reliable = [own for own in logits if int(own.argmax()) == label]
    if not reliable:
        return None
    inverse = [1 / -torch.sum(F.softmax(o, 0) * F.log_softmax(o, 0)).double() for o in reliable]
    alpha = torch.softmax(torch.stack(inverse), 0).float()
    return sum(weight * own for weight, own in zip(alpha, reliable, strict=True))


def transcription(run, state, x, y, pool, answers, rows, number, selective, epsilon):
    """Lines 4 to 15, sample by sample; returns the model, and the counts of S1, S2 and S3."""
    model = build("mlp2", (1, 8, 8), 10, seed=run.seed)
    model.load_state_dict(state)
    model.train()
    adam = torch.optim.Adam(
        model.parameters(), lr=run.training.lr, weight_decay=run.training.weight_decay
    )
    place = {int(row): position for position, row in enumerate(rows)}
    counts = [0, 0, 0]
    for index in batches(
        len(y), run.training.batch_size, torch_generator(run.seed, "server", number)
    ):
        logits = model(x[index])
        losses = []
        for own, i in zip(logits, index.tolist(), strict=True):
            label = int(y[i])
            ce = -F.log_softmax(own, 0)[label]
            taught = None
            if selective and int(own.argmax()) == label:
                counts[0] += 1
                pool[i] = own.detach()
            elif selective and i in pool:
                counts[1] += 1
                taught = pool[i]
            else:
                counts[2] += 1
                if i in place:
                    taught = reference_lesson(answers[:, place[i]], label, selective)
            kl = 0 if taught is None else softmax_kl(taught, own)
            losses.append(ce if taught is None else epsilon * ce + (1 - epsilon) * kl)
        adam.zero_grad()
        torch.stack(losses).mean().backward()
        adam.step()
    return model.state_dict(), counts


@pytest.mark.parametrize(("selective", "epsilon"), [(True, 0.75), (True, 0.2), (False, 0.75)])
def test_the_server_follows_algorithm_1(tmp_path, selective, epsilon):
    config = fedgems(
        rounds=3,
        weight_decay=1e-3,
        **{"fedgems.selective": selective, "fedgems.epsilon": epsilon},
    )
    server = Server(config, tmp_path / "run")
    strategy = server.strategy
    public = public_set(DataSpec.of(config.run), (1, 8, 8), 10)
    pool, parts = {}, set()
    for number in (1, 2, 3):
        before = {k: v.clone() for k, v in strategy.model.state_dict().items()}
        rows = strategy.wanted.nonzero()[0]
        answers = server.answers(server.ask(number))
        logits = torch.tensor(np.stack([said(r.parameters)["logits"] for _, r in answers]))
        server.strategy.aggregate_fit(number, answers, [])
        figures = strategy.state.record.method
        state, counts = transcription(
            config.run, before, public.x, public.y, pool, logits, rows, number, selective, epsilon
        )
        for name, tensor in strategy.model.state_dict().items():
            np.testing.assert_allclose(tensor, state[name], rtol=1e-3, atol=2e-5)
        assert [figures["s1"], figures["s2"], figures["s3"]] == counts
        parts |= {n for n, count in enumerate(counts) if count}
        assert strategy.pool.known.nonzero().flatten().tolist() == sorted(pool)
        for i, kept in pool.items():
            np.testing.assert_allclose(strategy.pool.logits[i], kept, rtol=1e-3, atol=1e-3)
    assert parts == ({0, 1, 2} if selective else {2})


def test_the_logits_asked_for_are_those_wrong_and_not_in_the_pool(tmp_path):
    server = Server(fedgems(rounds=4), tmp_path / "run")
    strategy = server.strategy
    for number in (1, 2, 3):
        wrong = strategy.logits.argmax(1) != strategy.y.numpy()
        expected = wrong & ~strategy.pool.known.numpy()
        asked = server.ask(number)
        count = len(strategy.y)
        for _, ins in asked:
            wanted = np.unpackbits(said(ins.parameters)["wanted"], count=count).astype(bool)
            np.testing.assert_array_equal(wanted, expected)
        answers = server.answers(asked)
        for proxy, result in answers:
            client = client_of(server, proxy)
            model = client.models["private"].eval()
            with torch.no_grad():
                own = model(public_set(DataSpec.of(client.run), (1, 8, 8), 10).x[wanted])
            np.testing.assert_allclose(said(result.parameters)["logits"], own, rtol=1e-4, atol=1e-5)
        strategy.aggregate_fit(number, answers, [])
        assert strategy.state.record.method["upload_ratio"] == expected.mean()


def test_the_upload_falls_and_without_selection_it_does_not(tmp_path):
    run(fedgems(rounds=5, lr=0.01), tmp_path / "gems")
    ratios = [record["method"]["upload_ratio"] for record in records(tmp_path / "gems")]
    assert ratios[0] > 0.7
    assert ratios[-1] < 0.2 * ratios[0]
    run(fedgems(rounds=2, **{"fedgems.selective": False}), tmp_path / "gem")
    assert all(record["method"]["upload_ratio"] == 1 for record in records(tmp_path / "gem"))
    one_round = 4 * 60 * 10 * 4  # clients, public samples, classes, bytes
    for record in records(tmp_path / "gem"):
        assert one_round < record["bytes_up"] < one_round + 4 * 500
    ups = [record["bytes_up"] for record in records(tmp_path / "gems")]
    expected = [4 * 500 + one_round * ratio for ratio in ratios]
    assert all(up < bound for up, bound in zip(ups, expected, strict=True))


# --- what is sent of the server's logits ----------------------------------------------------


def test_before_the_server_has_trained_it_has_nothing_to_say(tmp_path):
    server = Server(fedgems(), tmp_path / "run")
    asked, _ = play(server, 1)
    assert all("logits" not in said(ins.parameters) for _, ins in asked)
    assert all("logits" in said(ins.parameters) for _, ins in server.ask(2))


def frozen_but_for(strategy, rows_of_round):
    """Let the server's logits change in a few rows a round alone."""
    predict = strategy._predict

    def changed():
        number = strategy.state.record.round
        if number == 1:
            return predict()
        logits = strategy.logits.copy()
        logits[rows_of_round[number]] = predict()[rows_of_round[number]]
        return logits

    strategy._predict = changed


def test_only_what_changed_is_sent_and_who_was_away_catches_up(tmp_path):
    config = fedgems(rounds=9, fraction=0.5)
    server = Server(config, tmp_path / "run")
    strategy = server.strategy
    rng = np.random.default_rng(0)
    frozen_but_for(strategy, {n: rng.choice(60, 5, replace=False) for n in range(2, 10)})
    had, seen = {}, set()
    for number in range(1, 8):
        asked = server.ask(number)
        logits = strategy.logits.copy()
        for proxy, ins in asked:
            told = said(ins.parameters)
            if number == 1:
                continue
            part = "changed" in told
            assert part == (had.get(proxy.name, 0) > 1), "a part is of what was sent before"
            away = number - had.get(proxy.name, 0)
            seen.add((part, min(away, 3)))
            if part:
                assert len(told["logits"]) <= 5 * away
        answers = server.answers(asked)
        for proxy, _ in answers:
            had[proxy.name] = number
            if number > 1:
                np.testing.assert_array_equal(
                    client_of(server, proxy).state.tensors["logits"], logits
                )
        strategy.aggregate_fit(number, answers, [])
    assert {(True, 1), (True, 2)} <= seen, "some were away for a round"


def test_who_did_not_answer_is_told_all_anew(tmp_path):
    server = Server(fedgems(rounds=5), tmp_path / "run")
    frozen_but_for(server.strategy, {n: np.arange(n) for n in range(2, 6)})
    play(server, 1)
    play(server, 2)
    answers = server.answers(server.ask(3))
    server.strategy.aggregate_fit(3, answers[1:], [])
    whole = ["changed" not in said(ins.parameters) for _, ins in server.ask(4)]
    names = [proxy.name for proxy, _ in answers]
    assert whole == [name == names[0] for name in names]


def test_a_part_that_is_more_bytes_is_sent_whole(tmp_path):
    server = Server(fedgems(), tmp_path / "run")
    play(server, 1)
    play(server, 2)
    assert all("changed" not in said(ins.parameters) for _, ins in server.ask(3))


# --- a client -------------------------------------------------------------------------------


def opened(tmp_path, **changes):
    config = fedgems(**changes)
    node = read_node({"partition-id": 0, "num-partitions": 4}, config.run, str(tmp_path))
    client = config.method.client(config, node)
    client.state.restore("run", before=1)
    return client


def client_transcription(client, number, teacher, epsilon):
    """Lines 21 to 27: the public set by Eq. 6 where there is a teacher, then private data."""
    model = build("mlp", (1, 8, 8), 10, seed=client.run.seed).train()
    adam = torch.optim.Adam(model.parameters(), lr=client.run.training.lr)

    def step(losses):
        adam.zero_grad()
        torch.stack(losses).mean().backward()
        adam.step()

    public = client.public
    if teacher is not None:
        order = client.generator(number, "public")
        for index in batches(len(public), client.run.training.batch_size, order):
            step(
                [
                    epsilon * -F.log_softmax(own, 0)[public.y[i]]
                    + (1 - epsilon) * softmax_kl(teacher[i], own)
                    for own, i in zip(model(public.x[index]), index.tolist(), strict=True)
                ]
            )
    order = client.generator(number, "batches")
    for _ in range(client.run.training.local_epochs):
        for index in batches(len(client.y), client.run.training.batch_size, order):
            rows = zip(model(client.x[index]), client.y[index], strict=True)
            step([-F.log_softmax(own, 0)[label] for own, label in rows])
    return model


@pytest.mark.parametrize("taught", [True, False])
@pytest.mark.parametrize("epsilon", [0.75, 0.1])
def test_a_client_follows_algorithm_1(tmp_path, taught, epsilon):
    client = opened(tmp_path, local_epochs=2, **{"fedgems.epsilon": epsilon})
    count = len(client.public)
    teacher = 3 * torch.randn(count, 10, generator=torch.Generator().manual_seed(1))
    wanted = np.arange(count) % 3 == 0
    told = {"wanted": np.packbits(wanted)} | ({"logits": teacher.numpy()} if taught else {})
    answer = client.train(3, Knowledge(told)).tensors["logits"]
    model = client_transcription(client, 3, teacher if taught else None, epsilon)
    for name, tensor in model.state_dict().items():
        ours = client.models["private"].state_dict()[name]
        np.testing.assert_allclose(ours, tensor, rtol=1e-3, atol=2e-4)
    with torch.no_grad():
        expected = model.eval()(client.public.x[torch.tensor(wanted)])
    np.testing.assert_allclose(answer, expected, rtol=1e-2, atol=1e-3)


def test_asked_for_nothing_a_client_answers_with_nothing(tmp_path):
    client = opened(tmp_path)
    told = Knowledge({"wanted": np.packbits(np.zeros(len(client.public), bool))})
    assert client.train(1, told).tensors["logits"].shape == (0, 10)


@pytest.mark.parametrize(
    ("told", "fault"),
    [
        ({"logits": (60, 10), "changed": 60}, "no logits of before|60 rows for"),
        ({"logits": (7, 10)}, "7 rows for 60 samples"),
        ({"logits": (7, 10), "changed": 8}, "7 rows for 8 samples"),
    ],
)
def test_logits_that_do_not_fit_are_named(tmp_path, told, fault):
    client = opened(tmp_path)
    bits = np.packbits(np.arange(60) < min(told.get("changed", 0), 59))
    tensors = {"logits": np.zeros(told["logits"], np.float32)}
    tensors |= {"changed": bits} if "changed" in told else {}
    with pytest.raises(KnowledgeError, match=fault):
        client.train(2, Knowledge(tensors))


def test_a_reply_with_other_rows_than_asked_is_dropped(tmp_path):
    server = Server(fedgems(), tmp_path / "run")
    answers = server.answers(server.ask(1))
    server.strategy.wanted[:] = True
    server.strategy.aggregate_fit(1, answers, [])
    assert len(server.strategy.state.record.failed) == 4
    assert "with Q = 60" in server.strategy.state.record.failed["client-0"]


# --- the public set and the server's accuracy -----------------------------------------------


def rows_of(x):
    return {row.tobytes() for row in np.ascontiguousarray(x.numpy())}


def test_no_client_owns_a_public_sample(tmp_path):
    server = Server(fedgems(), tmp_path / "run")
    public = rows_of(server.strategy.x)
    assert len(public) == 60
    for number in range(4):
        data = client_data(DataSpec.of(server.strategy.run), number)
        assert not public & (rows_of(data.train.x) | rows_of(data.test.x) | rows_of(data.common.x))


def test_public_data_out_of_the_common_test_set_is_refused(tmp_path):
    common = common_test(DataSpec.of(fedgems().run))
    for part in ("train", "test"):
        (tmp_path / "data" / part).mkdir(parents=True)
        np.savez(tmp_path / "data" / part / "0.npz", x=common.x.numpy(), y=common.y.numpy())
    config = fedgems(public_dataset=f"npz:{tmp_path / 'data'}")
    with pytest.raises(DataError, match="samples of the common test set are in it too"):
        Server(config, tmp_path / "run")


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_site_whose_own_folder_holds_a_public_sample_is_named(tmp_path, part):
    """The share that is public is of the run's dataset, of which a site may have a copy."""
    config = fedgems(num_classes=10)
    public = public_set(DataSpec.of(config.run), (1, 8, 8), 10)
    owned = client_data(DataSpec.of(config.run), 0).train
    for name in ("train", "test"):
        of = public if name == part else owned
        np.savez(tmp_path / f"{name}.npz", x=of.x.numpy()[:20], y=of.y.numpy()[:20])
    node = read_node({"data": str(tmp_path), "name": "site"}, config.run, str(tmp_path / "state"))
    client = config.method.client(config, node)
    with pytest.raises(DataError, match="20 of 20 samples of site are in it too"):
        client.sizes()
    np.savez(tmp_path / f"{part}.npz", x=owned.x.numpy()[20:40], y=owned.y.numpy()[20:40])
    site_data.cache_clear()
    config.method.client(config, node).sizes()


def test_generated_rows_are_refused(tmp_path):
    table = {"dataset": "breast-cancer", "public_dataset": "generated", "public_samples": 40}
    with pytest.raises(SettingsError, match="have no labels, which this method learns from"):
        Server(fedgems(**table), tmp_path / "run")


def test_the_servers_model_is_judged_as_kind_server(tmp_path):
    server = Server(fedgems(rounds=2), tmp_path / "run")
    for number in (1, 2):
        play(server, number)
        server.close(number)
    strategy = server.strategy
    common = common_test(DataSpec.of(strategy.run))
    with torch.no_grad():
        right = strategy.model.eval()(common.x).argmax(1) == common.y
    found = strategy.state.record.accuracy["common"]["server"]
    assert found.per_client == {"server": pytest.approx(right.float().mean().item())}
    summary = server.log.finish()
    assert summary.accuracy["common"]["server"].mean == found.mean
    assert "server" not in summary.accuracy["personal"]
    assert "server" in summary.history[0].accuracy["common"]


def test_it_is_judged_only_when_the_clients_are(tmp_path):
    run(fedgems(rounds=3, evaluate_every=2), tmp_path / "run")
    judged = [bool(record["accuracy"]) for record in records(tmp_path / "run")]
    assert judged == [False, True, True]


def test_a_server_whose_training_diverges_ends_the_run(tmp_path):
    server = Server(fedgems(), tmp_path / "run")
    answers = server.answers(server.ask(1))
    with torch.no_grad():
        next(server.strategy.model.parameters()).fill_(torch.nan)
    with pytest.raises(StateError, match=r"training diverged; a smaller 'training\.lr'"):
        server.strategy.aggregate_fit(1, answers, [])


# --- checkpoints ----------------------------------------------------------------------------


def test_a_restored_server_goes_on_bit_for_bit(tmp_path):
    config = fedgems(rounds=4, fraction=0.75)
    server = Server(config, tmp_path / "run")
    for number in (1, 2):
        play(server, number)
    saved = {name: np.array(value) for name, value in server.strategy.state_dict().items()}
    assert {"logits", "changed", "pool/logits", "pool/known"} <= saved.keys()
    assert any(name.startswith("model/") for name in saved)
    other = Server(config, tmp_path / "other")
    other.strategy.load_state_dict(saved)
    asked = server.ask(3)
    again = {proxy.name: said(ins.parameters) for proxy, ins in other.ask(3)}
    for proxy, ins in asked:
        told = said(ins.parameters)
        assert told.keys() == again[proxy.name].keys()
        for name, tensor in told.items():
            np.testing.assert_array_equal(tensor, again[proxy.name][name])
    answers = server.answers(asked)
    replies = list(server.strategy._replies(answers, []))
    assert server.strategy.aggregate(3, replies) == other.strategy.aggregate(3, replies)
    for name, value in server.strategy.state_dict().items():
        np.testing.assert_array_equal(value, other.strategy.state_dict()[name])


def test_the_logits_that_a_client_holds_outlive_its_process(tmp_path):
    config = fedgems(rounds=3)
    server = Server(config, tmp_path / "run")
    play(server, 1)
    asked, _ = play(server, 2)
    proxy = asked[0][0]
    kept = client_of(server, proxy).state.tensors["logits"].clone()
    node = client_of(server, proxy).node
    fresh = config.method.client(config, node)
    fresh.state.restore(server.log.run_name, before=3)
    torch.testing.assert_close(fresh.state.tensors["logits"], kept)


@pytest.mark.slow
def test_the_numbers_are_the_same_on_ray(tmp_path):
    found = [
        run(fedgems(backend=backend, attack="ofom"), tmp_path / backend)
        for backend in ("inline", "ray")
    ]
    assert without_times(found[0]) == without_times(found[1])
