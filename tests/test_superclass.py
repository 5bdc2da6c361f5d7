"""Superclasses, and clients with different tasks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhet.base.errors import DataError, SettingsError
from fedhet.config.resolve import resolve
from fedhet.config.sources import parse_pairs, read_preset
from fedhet.data.dataset import Dataset, Format, Split
from fedhet.data.partition import assign, classes_by_superclass, label_spaces, merge_classes
from fedhet.data.site import site_data
from fedhet.data.spec import DataSpec
from fedhet.data.store import RunData, load

PAIRS = (("0", "1"), ("2", "3"), ("4", "5"), ("6", "7"), ("8", "9"))
DIGITS = DataSpec(
    clients=4,
    partition="superclasses",
    superclasses=PAIRS,
    label_space=(2, 3),
    samples_per_class=20,
)
WHOLE = load(DataSpec())


def own_labels(rows):
    return WHOLE.train.y.numpy()[rows]


def test_superclasses_replace_the_classes():
    dataset = load(DIGITS)
    assert dataset.format.classes == ("0+1", "2+3", "4+5", "6+7", "8+9")
    assert dataset.train.y.tolist() == [y // 2 for y in WHOLE.train.y.tolist()]
    assert dataset.test.y.tolist() == [y // 2 for y in WHOLE.test.y.tolist()]
    assert dataset.subclasses.tolist() == WHOLE.train.y.tolist()


def test_cifar100s_superclasses_are_a_partition_of_a_hundred():
    groups = classes_by_superclass("cifar100")
    names = [name for group in groups.values() for name in group]
    assert len(groups) == 20
    assert len(set(names)) == 100


# CIFAR-100's own labels, as its files have them: the fine names in alphabetical order, the coarse
# names in alphabetical order, and the coarse number of each fine label.
FINE_NAMES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup
dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower
leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid
otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray
road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
""".split()
COARSE_NAMES = """
aquatic_mammals fish flowers food_containers fruit_and_vegetables household_electrical_devices
household_furniture insects large_carnivores large_man-made_outdoor_things
large_natural_outdoor_scenes large_omnivores_and_herbivores medium_mammals non-insect_invertebrates
people reptiles small_mammals trees vehicles_1 vehicles_2
""".split()
COARSE_OF_FINE = [
    *(4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11),
    *(6, 11, 5, 10, 7, 6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5),
    *(5, 19, 8, 8, 15, 13, 14, 17, 18, 10, 16, 4, 17, 4, 2, 0, 17, 4, 18, 17),
    *(10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16, 12, 9, 13, 15, 13),
    *(16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13),
]


def test_cifar100_superclasses_equal_its_files():
    assert len(FINE_NAMES) == len(COARSE_OF_FINE) == 100
    groups = classes_by_superclass("cifar100")
    assert list(groups) == COARSE_NAMES
    for number, coarse in enumerate(COARSE_NAMES):
        expected = [n for n, c in zip(FINE_NAMES, COARSE_OF_FINE, strict=True) if c == number]
        assert sorted(groups[coarse]) == expected, coarse


@pytest.mark.parametrize(
    ("grouping", "fault"),
    [
        ((*PAIRS[:-1], ("8", "x")), "unknown class 'x'"),
        ((*PAIRS[:-1], ("8", "9", "0")), "class '0' is in two"),
        (PAIRS[:-1], "missing 8, 9"),
    ],
)
def test_invalid_grouping_raises(grouping, fault):
    with pytest.raises(SettingsError, match=fault):
        load(DIGITS.replace(superclasses=grouping))


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000),
    subclasses=st.sampled_from(["all", (1, 1), (1, 2)]),
    clients=st.integers(1, 5),
)
def test_clients_have_their_classes_and_disjoint_rows(seed, subclasses, clients):
    spec = DIGITS.replace(seed=seed, subclasses=subclasses, clients=clients, samples_per_class=11)
    found = assign(load(spec), spec)
    everyone = np.concatenate(found.rows)
    assert len(np.unique(everyone)) == len(everyone)
    for rows, space in zip(found.rows, found.spaces, strict=True):
        assert 2 <= len(space) <= 3
        assert list(space) == sorted(set(space))
        labels = load(spec).train.y.numpy()[rows]
        assert np.bincount(labels, minlength=5).tolist() == [11 * (k in space) for k in range(5)]
        for label in space:
            counts = np.bincount(own_labels(rows[labels == label]), minlength=10)
            held = counts[counts > 0]
            if subclasses == "all":
                assert sorted(held) == [5, 6]
            else:
                assert len(held) in subclasses
                assert held.max() - held.min() <= 1


def test_label_spaces_vary_in_size_and_depend_on_the_seed():
    spec = DIGITS.replace(clients=60)
    spaces = label_spaces(spec, 5)
    assert {len(space) for space in spaces} == {2, 3}
    assert len(set(spaces)) > 5
    assert spaces == label_spaces(spec, 5) != label_spaces(spec.replace(seed=1), 5)
    # Another number of clients leaves those who were there as they were.
    assert label_spaces(spec.replace(clients=10), 5) == spaces[:10]


def test_exhausted_subclasses_are_drawn_again():
    """Two clients draw 2 x 30 samples of a class of 60; half of the draws coincide."""
    labels = torch.arange(120) % 4
    split = Split(torch.zeros(120, 1), labels)
    dataset = merge_classes(
        Dataset("d", split, None, Format("table", (1,), tuple("0123"))), PAIRS[:2]
    )
    spec = DataSpec(
        clients=2, partition="superclasses", label_space=2, subclasses=1,
        samples_per_class=30, superclasses=[["0", "1"], ["2", "3"]],
    )  # fmt: skip
    for seed in range(10):
        found = assign(dataset, spec.replace(seed=seed))
        kinds = [set(dataset.subclasses[rows].tolist()) for rows in found.rows]
        assert kinds[0].isdisjoint(kinds[1])


FINE = torch.arange(50_000) % 100


@pytest.mark.parametrize("preset", ["cofed-cifar100-iid", "cofed-cifar100-non-iid"])
@pytest.mark.parametrize("seed", [0, 4, 27, 30, 40])
def test_hundred_clients_find_cifar100_large_enough(preset, seed):
    """With these seeds, up to 50 clients have one superclass of 2,500 samples."""
    spec = DataSpec.for_run(resolve(read_preset(preset)).run).replace(seed=seed)
    names = tuple(map(str, range(20)))
    split = Split(torch.zeros(50_000, 1), FINE // 5)
    found = assign(
        Dataset("d", split, None, Format("table", (1,), names), subclasses=FINE.numpy()), spec
    )
    everyone = np.concatenate(found.rows)
    assert len(np.unique(everyone)) == len(everyone)
    fine = FINE.numpy()
    for rows, space in zip(found.rows, found.spaces, strict=True):
        assert 6 <= len(space) <= 8
        for label in space:
            held = np.bincount(fine[rows[fine[rows] // 5 == label]], minlength=100)
            assert held.sum() == 51
            assert (held > 0).sum() in ((5,) if preset.endswith("100-iid") else (1, 2))
            assert held[held > 0].max() - held[held > 0].min() <= 1
    if seed == 0:  # where the first draw of the tasks will do, it is taken
        assert found.spaces == label_spaces(spec, 20)


def test_too_little_data_or_too_few_classes_raise():
    with pytest.raises(DataError, match=r"because the class has only .*\. Lower"):
        RunData(DIGITS.replace(samples_per_class=200)).partition()
    with pytest.raises(DataError, match=r"label-space.*5.*\[6, 8\]"):
        RunData(DIGITS.replace(label_space=(6, 8))).partition()


@pytest.mark.parametrize("subclasses", ["all", (1, 1)])
def test_client_is_evaluated_on_all_subclasses(subclasses):
    spec = DIGITS.replace(subclasses=subclasses)
    store = RunData(spec)
    whole = store.common_test
    for index in range(spec.clients):
        data = store.client(index)
        assert set(data.train.y.tolist()) == set(data.space)
        expected = [y for y in whole.y.tolist() if y in data.space]
        assert data.common.y.tolist() == expected
        assert len(expected) < len(whole)
        assert store.label_counts()[data.name] == [20 * (k in data.space) for k in range(5)]


def test_public_training_rows_belong_to_no_client():
    spec = DIGITS.replace(public_fraction=0.3)
    dataset = load(spec)
    assert len(dataset.subclasses) == len(dataset.train)
    pixels = {row.numpy().tobytes(): int(y) for row, y in zip(*vars(WHOLE.train).values())}  # noqa: B905
    for rows in RunData(spec).partition():
        found = [pixels[dataset.train.x[row].numpy().tobytes()] for row in rows]
        assert found == dataset.subclasses[rows].tolist()


def test_other_partitions_have_one_task():
    spec = DataSpec(clients=3, superclasses=PAIRS)
    store = RunData(spec)
    assert store.client(0).space == (0, 1, 2, 3, 4)
    assert store.client(0).common is store.common_test


def test_task_of_a_site_is_its_present_classes(tmp_path):
    rng = np.random.default_rng(0)
    for part, labels in (("train", [1, 4] * 4), ("test", [4, 1])):
        x = rng.normal(size=(len(labels), 3)).astype(np.float32)
        np.savez(tmp_path / f"{part}.npz", x=x, y=np.array(labels))
    data = site_data(f"npz:{tmp_path}", spec=DataSpec(), classes=6, name="site")
    assert data.space == (1, 4)


def test_settings_set_superclasses():
    said = {
        "clients": 4, "data.partition": "superclasses", "data.superclasses": PAIRS,
        "data.label-space": [2, 3], "data.subclasses": 1, "data.samples-per-class": 9,
    }  # fmt: skip
    spec = DataSpec.for_run(resolve(said).run)
    assert (spec.label_space, spec.subclasses, spec.samples_per_class) == ((2, 3), (1, 1), 9)
    own = {"subclasses": (1, 1), "samples_per_class": 9, "validation_fraction": 0.0}
    assert spec == DIGITS.replace(**own)
    assert DataSpec.for_run(resolve({}).run).subclasses == "all"
    for text, ends in (("6-8", (6, 8)), ("7", (7,)), ("1,1", (1, 1)), ("all", "all")):
        assert parse_pairs([f"subclasses={text}"]) == {"data.subclasses": ends}
    assert resolve({"data.subclasses": [7]}).run.data.subclasses == (7, 7)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("label-space", text)
            for text in ("all", "", "3-2", "0", "0-3", "1-2-3", "a", "1-", "²")
        ),
        *(("subclasses", text) for text in ("0-1", "", "2-1", "-1", "1.5", "none", "1" * 7)),
    ],
)
def test_invalid_range_raises(name, value):
    rule = "all or integer >= 1" if name == "subclasses" else "integer >= 1"
    with pytest.raises(SettingsError, match=rf"'data.{name}': expected {rule}"):
        resolve(parse_pairs([f"{name}={value}"]))


@pytest.mark.parametrize("value", ["6-", [3, 2], 0, [0, 3], [1, 2, 3], True, [], [1.5, 2], None])
def test_range_has_two_ends(value):
    with pytest.raises(SettingsError) as caught:
        resolve({"data.label-space": value})
    rule = "integer >= 1, or a range such as [6, 8]"
    assert str(caught.value) == f"setting 'data.label-space': expected {rule}, got {value!r}"
