"""Texts: reading, tokens, clients by column, site directories, and rejected files."""

import csv
import gzip
import hashlib
import json
import re

import numpy as np
import pytest
import torch
from federation import client_info

from fedhet.base.errors import DataError, SettingsError
from fedhet.base.seeding import numpy_rng
from fedhet.cli.example import OWNERS, TOPICS, write_example
from fedhet.client_runtime.node import read_node
from fedhet.client_runtime.samples import client_data
from fedhet.config.resolve import check, resolve
from fedhet.data.rows import read_table
from fedhet.data.site import site_data
from fedhet.data.spec import DataSpec
from fedhet.data.store import RunData, load
from fedhet.data.texts import tokenize, words

ROWS = [
    ("The cat, sat!", "pets", "ann"),
    ("a dog\nbarked", "pets", "bob"),
    ("stocks fell", "money", "ann"),
    ('banks "rose"', "money", "bob"),
    ("Ünïcode straße", "money", "ann"),
] * 4


def write(path, rows=ROWS, header=("text", "label", "who")):
    opened = gzip.open if path.suffix == ".gz" else open
    name = path.name.removesuffix(".gz")
    with opened(path, "wt", encoding="utf-8", newline="") as file:
        if name.endswith(".jsonl"):
            file.writelines(json.dumps(dict(zip(header, row, strict=True))) + "\n" for row in rows)
        elif name.endswith(".tsv"):
            lines = [header, *rows] if header else rows
            file.writelines("\t".join(line) + "\n" for line in lines)
        else:
            csv.writer(file).writerows([header, *rows] if header else rows)
    return path


def spec(place, **changes):
    return DataSpec(**{"dataset": f"text:{place}", "clients": 2, "min_samples": 2, **changes})


def by_hand(text, vocabulary, length):
    """Return the tokens of a text, word by word, as the module's docstring defines them."""
    found = re.findall(r"\w+|[^\w\s]", text.casefold()) or [""]
    digests = [hashlib.blake2b(word.encode(), digest_size=8).digest() for word in found]
    tokens = [1 + int.from_bytes(each, "big") % (vocabulary - 1) for each in digests][:length]
    return tokens + [0] * (length - len(tokens))


def test_tokens_are_hashes_of_words_and_end_in_padding():
    texts = [row[0] for row in ROWS[:5]] + ["", "one " * 20]
    found = tokenize(texts, spec("x", vocabulary=1000, max_tokens=8), "x")
    assert found.dtype == torch.int64
    assert found.tolist() == [by_hand(text, 1000, 8) for text in texts]
    assert (found[:, 0] > 0).all()  # no text is empty
    assert words("Ａ ﬁne ＣＡＴ") == ["a", "fine", "cat"]  # compatible forms are one


def test_windows_are_labeled_with_the_word_that_follows(tmp_path):
    text = "The cat sat on the mat. Then the dog sat down, and the cat left!"
    (tmp_path / "train.txt").write_text(text)
    (tmp_path / "test.txt").write_text("A dog sat on the cat")
    options = {"vocabulary": 50, "max_tokens": 3, "dataset": f"next-token:{tmp_path}"}
    data = load(spec("", **options))
    tokens = by_hand(text, 50, 18)
    assert 0 not in tokens  # 18 words and marks: four windows of four, and two that are left
    assert data.train.x.tolist() == [tokens[0:3], tokens[4:7], tokens[8:11], tokens[12:15]]
    assert data.train.y.tolist() == [tokens[3], tokens[7], tokens[11], tokens[15]]
    assert data.test.x.tolist() == [by_hand("A dog sat", 50, 3)]
    assert data.test.y.tolist() == by_hand("on", 50, 1)
    assert (data.format.classes[0], len(data.format.classes)) == ("0", 50)
    one_file = load(spec("", **options | {"dataset": f"next-token:{tmp_path / 'train.txt'}"}))
    assert one_file.train.x.equal(data.train.x)
    assert one_file.test is None
    with pytest.raises(SettingsError, match=r"4,096.*8,192"):
        load(spec("", **options | {"vocabulary": 8192}))
    with pytest.raises(DataError, match=r"test\.txt: .*9 tokens"):
        load(spec("", **options | {"max_tokens": 9}))
    (tmp_path / "train.txt").unlink()
    with pytest.raises(DataError, match=r"train.txt"):
        load(spec("", **options))


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "jsonl", "jsonl.gz"])
def test_every_kind_of_file_reads_the_same(tmp_path, ending):
    data = load(spec(write(tmp_path / f"all.{ending}"), max_tokens=6))
    assert data.format.classes == ("money", "pets")
    assert data.train.y.tolist() == [1, 1, 0, 0, 0] * 4
    assert data.train.x.tolist() == [by_hand(row[0], 8192, 6) for row in ROWS]
    assert data.format.shape == (0, 6, 8192)
    assert data.test is None


def test_in_tsv_quotes_mean_nothing(tmp_path):
    rows = [('say "a', "x"), ('"b', "y")]
    data = load(spec(write(tmp_path / "all.tsv", rows, ("text", "label")), max_tokens=6))
    assert data.train.x.tolist() == [by_hand(row[0], 8192, 6) for row in rows]


def test_columns_by_index_are_joined_and_numeric_labels_sorted(tmp_path):
    rows = [("10", "a", "b"), ("9", "c", "d"), ("2", "e", "f")]
    path = write(tmp_path / "all.csv", rows, None)
    data = load(spec(path, text_column=["2", "3"], label_column="1", max_tokens=4))
    assert data.format.classes == ("2", "9", "10")
    assert data.train.y.tolist() == [2, 1, 0]
    assert data.train.x[0].tolist() == by_hand("a b", 8192, 4)


def test_column_names_owners(tmp_path):
    path = write(tmp_path / "all.csv")
    found = RunData(spec(path, by="who")).partition()
    assert [rows.tolist() for rows in found] == [
        [row for row in range(20) if ROWS[row][2] == name] for name in ("ann", "bob")
    ]
    (largest,) = RunData(spec(path, by="who", clients=1)).partition()  # the one with the most
    assert len(largest) == 12
    kept = load(spec(path, by="who", max_samples=10))
    assert len(kept.groups) == 10
    named = {by_hand(r[0], 8192, 128)[0]: r[2] for r in ROWS}
    assert [named[int(x[0])] for x in kept.train.x] == [["ann", "bob"][g] for g in kept.groups]
    with pytest.raises(DataError, match=r"2.*data\.by"):
        RunData(spec(path, by="who", clients=3, min_samples=2)).partition()
    with pytest.raises(DataError, match=r"1 of the 2 groups in data\.by"):
        RunData(spec(path, by="who", min_samples=10)).partition()
    with pytest.raises(SettingsError, match=r"data\.by"):
        load(DataSpec(by="who"))
    for owner in ("", " ", "NULL"):
        other = write(tmp_path / "b.csv", [*ROWS, ("x", "0", owner)])
        with pytest.raises(DataError, match=r"row \d+, column 'who'"):
            load(spec(other, by="who"))


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "tsv", "jsonl"])
def test_memory_of_rows_is_limited(tmp_path, ending):
    rows = [(f"{k} " + "word " * 400, str(k % 3)) for k in range(1000)]
    path = write(tmp_path / f"all.{ending}", rows, ("text", "label"))
    assert len(read_table(path, spec(path, max_bytes=4_000_000), texts=("text",))) == 1000
    with pytest.raises(DataError, match=r"data\.max-bytes = 1000000"):
        read_table(path, spec(path, max_bytes=1_000_000), texts=("text",))


def test_rows_are_counted_without_empty_lines(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('text,label\n\n"one\ntwo",1\n\nthree,NA\nfour,2\n')
    with pytest.raises(DataError, match="row 2, column 'label'"):
        load(spec(path))


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.jsonl", '{"text": "x"}', "column 'label' not found"),
        ("a.csv", "text,label\nx,1\ny\n", "Row #3: Expected 2 columns, got 1"),
        ("a.csv", "txt,label\nx,1\n", "column 'text' not found, .*'txt', 'label'; did you mean"),
        ("a.csv", "text,label\nx,\ny,1\nz,2\n", "row 1, column 'label': the label is missing"),
        ("a.csv", "text,label\nx,1\ny,N/A\nz,2\n", "row 2, column 'label': the label is missing"),
        ("a.csv", "text,label\nx,1\n ,2\n", "row 2, column 'text': the text is missing"),
        ("a.csv", "text,label\n", "no rows found"),
        ("a.csv", "", "not a readable table"),
        ("a.csv", b"text,label\n\xff,1\n", "not a readable table"),
        ("a.csv.gz", b"no archive", "not a readable table"),
        ("a.jsonl", '{"text": "x", "label": "1"}\n{\n', "not a readable table .*in row 1"),
        ("a.jsonl", "[1]\n", "not a readable table"),
        ("a.jsonl", '{"text": "\\uD800", "label": 1}', "not a readable table"),
        (
            "a.jsonl",
            '{"text": null, "label": 1}\n{"text": "x", "label": 2}',
            "row 1, column 'text'",
        ),
        ("a.jsonl", '{"texts": "x", "label": 1}', "column 'text' not found, .*did you mean"),
        ("a.txt", "x", "unsupported format, expected one of .csv, .csv.gz, .tsv"),
        ("a.csv", 'text,label\n"x\x07",\x07\n', "label '.x07' must be printable"),
    ],
)
def test_invalid_file_raises(tmp_path, name, content, fault):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=fault) as error:
        load(spec(path))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_oversized_file_raises_before_unpacking(tmp_path):
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"text,label\n" + b" " * 5_000_000))
    with pytest.raises(DataError, match=r"data\.max-bytes = 100000"):
        load(spec(path, max_bytes=100_000))
    small = write(tmp_path / "b.csv")
    with pytest.raises(DataError, match="655360"):
        load(spec(small, max_bytes=100_000, max_tokens=4096))  # 20 texts of 8 bytes a token


def tree(root, rows=ROWS, part="train"):
    for number, (text, label, _) in enumerate(rows):
        (root / part / label).mkdir(parents=True, exist_ok=True)
        (root / part / label / f"{number:03}.txt").write_text(text, encoding="utf-8")
    return root


def test_tree_equals_a_file(tmp_path):
    tree(tree(tmp_path), ROWS[:5], "test")
    data = load(spec(tmp_path, max_tokens=6))
    ordered = [row for label in ("money", "pets") for row in ROWS if row[1] == label]
    assert data.train.x.tolist() == [by_hand(row[0], 8192, 6) for row in ordered]
    assert (len(data.test), data.format.classes) == (5, ("money", "pets"))
    with pytest.raises(SettingsError, match=r"data\.by.*'who'"):
        load(spec(tmp_path, by="who"))
    (tmp_path / "train" / "pets" / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"bad\.txt"):
        load(spec(tmp_path, max_tokens=7))


def samples(data):
    splits = (data.train, data.test)
    return sorted([*x, y] for s in splits for x, y in zip(s.x.tolist(), s.y.tolist(), strict=True))


@pytest.mark.parametrize("layout", ["csv", "tree"])
def test_site_reads_its_directory_like_a_simulation(tmp_path, layout):
    """Compare a deployed node with its own directory with a client that has the same rows."""
    rows = [(text, label, who) for text, label, who in ROWS if who == "ann"]
    site = tmp_path / "site"
    site.mkdir()
    ordered = [row for label in ("money", "pets") for row in rows if row[1] == label]
    write(site / "train.csv", ordered) if layout == "csv" else tree(site, rows)
    whole = write(tmp_path / "all.csv", [*ordered, *(row for row in ROWS if row[2] == "bob")])
    run = resolve(
        {
            "method": "felo",
            "clients": 2,
            "data.dataset": f"text:{whole}",
            "data.by": "who",
            "data.min-samples": 2,
            "models.num-classes": 2,
        }
    )
    simulated = RunData.for_run(run.run).client(0)
    node = read_node(
        {"data": f"text:{site}", "name": simulated.name}, run.run, str(tmp_path / "state")
    )
    own = client_data(run, node)
    # Which of the rows are its test split is drawn by the name, which has the folder in it.
    assert samples(own) == samples(simulated)
    assert len(own.test) == len(simulated.test)
    assert (own.format.shape, own.format.classes, own.space) == (
        simulated.format.shape,
        simulated.format.classes,
        simulated.space,
    )


def test_labels_of_a_site_are_those_of_the_run(tmp_path):
    write(tmp_path / "train.csv", [("x", "pets", ""), ("y", "pets", ""), ("z", "pets", "")])

    def site(**changes):
        changes = {"test_fraction": 0.34, **changes}
        return site_data(f"text:{tmp_path}", spec=spec("x", **changes), classes=2, name="site-a")

    with pytest.raises(DataError, match=r"2 classes.*1"):
        site()
    (tmp_path / "classes.txt").write_text("money\npets\n")
    assert site(vocabulary=99).train.y.tolist() == [1, 1]
    (tmp_path / "classes.txt").write_text("money\npet\n")
    with pytest.raises(DataError, match=r"row 1, column 'label': .*'pets'"):
        site(vocabulary=98)
    (tmp_path / "classes.txt").unlink()
    write(tmp_path / "train.csv", [("x", "1", ""), ("y", "1", ""), ("z", "0", "")])
    found = site(vocabulary=97)
    assert sorted([*found.train.y.tolist(), *found.test.y.tolist()]) == [0, 1, 1]
    (tmp_path / "train.tsv").write_text("text\tlabel\n")
    with pytest.raises(DataError, match=r"train\.csv and train\.tsv"):
        site(vocabulary=96)


def test_sites_texts_without_a_class(tmp_path):
    tree(tmp_path)
    (tmp_path / "train" / "unlabeled").mkdir()
    (tmp_path / "train" / "unlabeled" / "a.txt").write_text("a bird")
    for wanted in (True, False):
        found = site_data(
            f"text:{tmp_path}",
            spec=spec("x", sample_kind="text"),
            classes=2,
            name="site-b",
            unlabeled=wanted,
        )
        assert len(found.unlabeled) == wanted
        assert found.num_unused_unlabeled == (not wanted)
    assert found.format.shape == (0, 128, 8192)


def test_server_finds_the_common_test_set_of_texts(tmp_path):
    write(tmp_path / "train.csv")
    write(tmp_path / "test.csv", ROWS[:5])
    store = RunData(spec(tmp_path, max_tokens=6))
    shape = store.dataset.format.shape
    assert shape == (0, 6, 8192)
    found = store.common_test_of(client_info("text", shape))
    assert found.x.tolist() == [by_hand(row[0], 8192, 6) for row in ROWS[:5]]
    assert store.common_test_of(client_info("text", (0, 6, 100))) is None, "another vocabulary"
    assert store.common_test_of(client_info("image", shape)) is None


def test_generated_texts_are_words_of_the_training_set(tmp_path):
    whole = spec(write(tmp_path / "a.csv"), public_dataset="generated", public_samples=300)
    data = load(whole)
    x = RunData(whole).public_set(client_info(data.format.kind, data.format.shape), labeled=False).x
    assert x.shape == (300, 128)
    own = data.train.x
    assert set(x.unique().tolist()) <= set(own.unique().tolist())
    lengths = (x != 0).sum(1)
    assert set(lengths.tolist()) <= set((own != 0).sum(1).tolist())
    assert all((row[:length] != 0).all() for row, length in zip(x, lengths, strict=True))
    with pytest.raises(SettingsError, match=r"public-samples.*1"):
        RunData(whole.replace(public_samples=0)).public_set(
            client_info(data.format.kind, data.format.shape), labeled=False
        )


def test_vocabulary_is_part_of_what_clients_agree_on(tmp_path):
    place = write(tmp_path / "a.csv")
    public = spec("x", public_dataset=f"text:{place}", vocabulary=500)
    with pytest.raises(DataError, match=r"128 tokens.*8192"):
        RunData(public).public_set(client_info("text", (0, 128, 8192)), labeled=False)


@pytest.mark.parametrize("kind", ["text", "signal"])
def test_example_data_can_be_learned_from_by_site(tmp_path, kind):
    write_example(kind, tmp_path / "a")
    whole = DataSpec(dataset=f"{kind}:{tmp_path / 'a'}", by="site", clients=OWNERS)
    data = load(whole)
    assert (len(data.train), len(data.test), len(data.format.classes)) == (1200, 300, len(TOPICS))
    assert sum(map(len, RunData(whole).partition())) == 1200
    with pytest.raises(DataError, match="directory"):
        write_example(kind, tmp_path / "a")
    write_example(kind, tmp_path / "b")
    again = load(whole.replace(dataset=f"{kind}:{tmp_path / 'b'}"))
    assert torch.equal(data.train.x, again.train.x)


def test_default_models_are_those_of_the_kind(tmp_path):
    place = write(tmp_path / "a.csv")

    def of(**changes):
        return resolve({"data.dataset": f"text:{place}", **changes})

    pool = ("text-bag", "text-cnn", "text-gru", "text-lstm", "text-transformer")
    assert of().run.models.pool == pool
    assert of(method="cofed").run.models.pool == pool
    assert of(method="fedavg").run.models.pool == ("text-cnn",)
    assert of(method="um-pfssl").run.models.pool == ("text-cnn-dropout",)
    assert of(method="fedtype").method_settings.proxy == "text-cnn"
    assert of(method="fedgems").method_settings.server_model == "text-transformer"
    signals = resolve({"method": "fedgems", "data.sample-kind": "signal"})  # of sites' own folders
    assert signals.method_settings.server_model == "signal-resnet"
    assert signals.run.models.pool == (
        "signal-cnn2",
        "signal-cnn3",
        "signal-gru",
        "signal-resnet",
        "mlp",
    )
    assert resolve(of().flat()) == of()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"models.pool": "cnn2"}, "model 'cnn2' does not support texts"),
        ({"method": "local", "models.pool": "sk-tree"}, "model 'sk-tree' does not support texts"),
        ({"training.augment": "crop"}, "supports images .* got texts of up to"),
    ],
)
def test_unsupported_settings_for_texts_raise(tmp_path, changes, fault):
    place = write(tmp_path / "a.csv")
    config = resolve(
        {"data.dataset": f"text:{place}", "clients": 2, "data.min-samples": 2, **changes}
    )
    with pytest.raises(Exception, match=fault) as error:
        check(config)
    assert "\n" not in str(error.value)


def test_token_changes_keep_words_and_order():
    from fedhet.kinds.changes import CHANGES, REACH, delete_tokens, shuffle_tokens

    rng = numpy_rng(0, "tokens")
    lengths = rng.integers(1, 40, 200)
    x = torch.zeros(200, 40, dtype=torch.int64)
    for row, length in zip(x, lengths, strict=True):
        row[:length] = torch.from_numpy(1 + rng.permutation(length))  # each token once
    kept = delete_tokens(x, torch.Generator().manual_seed(1), 0.3)
    for before, after in zip(x.tolist(), kept.tolist(), strict=True):
        stayed = [token for token in after if token]
        assert stayed == [token for token in before if token in set(stayed)]  # in order
        assert after[len(stayed) :] == [0] * (40 - len(stayed))
        assert stayed
    share = 1 - (kept != 0).sum() / (x != 0).sum()
    assert 0.25 < share < 0.35
    places = shuffle_tokens(x, torch.Generator().manual_seed(2))
    for before, after in zip(x.tolist(), places.tolist(), strict=True):
        assert sorted(before) == sorted(after)
        away = [abs(before.index(token) - place) for place, token in enumerate(after) if token]
        assert max(away) <= REACH
    assert (places != x).any()
    single = torch.ones(5, 1, dtype=torch.int64)
    assert torch.equal(CHANGES["text"]["strong"](single, torch.Generator()), single)


def test_signal_file_is_read_unchanged(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 2, 16)), np.arange(30) % 3
    np.savez(tmp_path / "train.npz", x=x, y=y, who=np.array(["b", "a", "b"] * 10))
    whole = DataSpec(dataset=f"signal:{tmp_path}", clients=2, by="who")
    data = load(whole)
    assert data.format.shape == (2, 16)
    assert np.array_equal(data.train.x.numpy(), x.astype(np.float32))
    assert [len(rows) for rows in RunData(whole).partition()] == [10, 20]
    assert RunData(whole).owners() == {"client-0": "a", "client-1": "b"}
    np.savez(tmp_path / "train.npz", x=x[:, 0], y=y)  # one channel
    assert load(whole.replace(by="", max_bytes=10**6)).format.shape == (1, 16)
    with pytest.raises(DataError, match="'who'"):
        load(whole.replace(max_bytes=10**6))
    np.savez(tmp_path / "train.npz", x=x, y=y, who=np.zeros((30, 2)))
    with pytest.raises(DataError, match="who "):
        load(whole.replace(max_bytes=10**7))
    np.savez(tmp_path / "train.npz", x=x[..., None], y=y)
    with pytest.raises(DataError, match=r"x must be \[N, channels, time\]"):
        load(whole.replace(by="", max_bytes=10**7))
    np.savez(tmp_path / "train.npz", x=np.where(x > 2, np.nan, x), y=y)
    with pytest.raises(DataError, match="NaN or infinite"):
        load(whole.replace(by="", max_bytes=10**8))


def test_signals_of_clients_and_of_a_site(tmp_path):
    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        for client in range(2):
            x, y = rng.normal(size=(8, 1, 16)), np.arange(8) % 2
            np.savez(tmp_path / part / f"{client}.npz", x=x, y=y)
    whole = DataSpec(dataset=f"signal:{tmp_path}", clients=2)
    assert RunData(whole).client(1).format.shape == (1, 16)
    with pytest.raises(SettingsError):
        load(whole.replace(by="who"))
    site = tmp_path / "site"
    site.mkdir()
    for part in ("train", "test"):
        (site / f"{part}.npz").write_bytes((tmp_path / part / "1.npz").read_bytes())
    own = site_data(f"signal:{site}", spec=DataSpec(), classes=2, name="client-1")
    assert torch.equal(own.train.x, RunData(whole).client(1).train.x)
    assert own.format.shape == (1, 16)  # and not an image of one channel


def test_tasks_of_texts_may_differ_in_their_superclasses(tmp_path):
    """As with images, topics are joined, and each client draws some topics."""
    write_example("text", tmp_path / "texts")
    given = spec(
        tmp_path / "texts",
        superclasses=[["garden", "kitchen"], ["journey", "workshop"]],
        partition="superclasses",
        label_space=2,
        subclasses=1,
        samples_per_class=20,
    )
    with (tmp_path / "texts" / "train.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert load(given).format.classes == ("garden+kitchen", "journey+workshop")
    for client in range(2):
        places = np.concatenate(RunData(given).split_rows(client))
        data = RunData(given).client(client)
        topics = {rows[place]["label"] for place in places}
        assert data.space == (0, 1)
        assert [len(topics & {"garden", "kitchen"}), len(topics)] == [1, 2]
        labels = {"garden": 0, "kitchen": 0, "journey": 1, "workshop": 1}
        wanted = sorted(labels[rows[place]["label"]] for place in places)
        assert sorted(data.train.y.tolist() + data.test.y.tolist()) == wanted


def test_a_missing_text_column_names_its_setting(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("body,label\nhello,a\nworld,b\n")
    with pytest.raises(DataError, match=r"column 'text' not found, .*data\.text-column"):
        load(spec(path, label_column="label"))
