"""The vote against Algorithm 1 with dictionaries, sets, and loops, without shared code."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhet.algorithms.consensus import (
    CELLS,
    Vote,
    aggregate,
    count_conflicts,
    labels_in_space,
    undecided,
)


def algorithm_1(predictions, spaces, every, alpha, instances, weights):
    """Run lines 1 to 15; Section 4.6 adds weights instead of 1."""
    total, sets = {}, {}
    for c in every:
        total[c] = 0.0
        for i, space in enumerate(spaces):
            if c in space:
                total[c] += weights[i]
        sets[c] = set()
    for index in range(instances):
        count = {}
        for i in range(len(spaces)):
            said = predictions[i][index]
            if said is None:  # abstains: adds to no COUNT, and stays in TOTAL
                continue
            count[said] = count.get(said, 0.0) + weights[i]
        for c in count:
            if count[c] / total[c] > alpha:
                sets[c].add(index)
    return sets


def section_4_3(sets, space):
    """Compute Eq. 19 without indices that are in two of the participant's sets."""
    received = {}
    for c in sorted(space):
        for index in sets[c]:
            received.setdefault(index, []).append(c)
    return {index: held[0] for index, held in received.items() if len(held) == 1}


def drawn(seed):
    """Return a random case with few classes and voters, so that ties and conflicts are frequent."""
    rng = np.random.default_rng(seed)
    classes, voters = int(rng.integers(1, 7)), int(rng.integers(1, 9))
    instances = int(rng.integers(0, 12))
    spaces = [
        np.sort(rng.choice(classes, rng.integers(1, classes + 1), replace=False))
        for _ in range(voters)
    ]
    predictions = [rng.choice(space, instances) for space in spaces]
    weights = {
        0: np.ones(voters),
        1: rng.integers(1, 1000, voters).astype(float),
        2: rng.uniform(0.1, 3.0, voters),
    }[int(rng.integers(0, 3))].tolist()
    holders = int(rng.integers(1, voters + 1))
    alpha = float(
        rng.choice([0.0, 1.0, 0.3, 0.5, rng.uniform(), int(rng.integers(0, holders + 1)) / holders])
    )
    return classes, spaces, predictions, weights, alpha, instances


def ours(classes, spaces, predictions, weights, alpha):
    smallest = np.min_scalar_type(classes - 1)
    votes = [
        Vote(np.asarray(p, smallest), space, w)
        for p, space, w in zip(predictions, spaces, weights, strict=True)
    ]
    return aggregate(votes, classes, alpha)


@pytest.mark.parametrize("block", range(6))
def test_voting_equals_algorithm_1(block):
    tied = alone = contradicted = 0
    for seed in range(500 * block, 500 * (block + 1)):
        classes, spaces, predictions, weights, alpha, instances = drawn(seed)
        every = sorted({int(c) for space in spaces for c in space})
        expected = algorithm_1(predictions, spaces, every, alpha, instances, weights)
        joined = ours(classes, spaces, predictions, weights, alpha)
        assert joined.shape == (classes, instances)
        for c in range(classes):
            assert set(np.flatnonzero(joined[c])) == expected.get(c, set()), seed
        for space in spaces:
            kept, labels = labels_in_space(joined, space)
            assert np.all(np.diff(kept) > 0)
            received = section_4_3(expected, space)
            assert dict(zip(kept.tolist(), labels.tolist(), strict=True)) == received
            lost = sum(sum(i in expected[c] for c in space) > 1 for i in range(instances))
            assert count_conflicts(joined, space) == lost
            contradicted += lost
        alone += any(sum(c in space for space in spaces) == 1 for c in every)
        tied += is_tied(predictions, spaces, weights, alpha)
    assert min(tied, alone, contradicted) > 20, "the cases do not test what they are for"


def is_tied(predictions, spaces, weights, alpha):
    """Return whether the fraction of a class is exactly the threshold, above 0."""
    for column in zip(*predictions, strict=True):
        for c in set(column):
            total = sum(w for w, space in zip(weights, spaces, strict=True) if c in space)
            count = sum(w for w, said in zip(weights, column, strict=True) if said == c)
            if alpha > 0 and count / total == alpha:
                return True
    return False


def test_no_votes():
    assert aggregate([], 3, 0.3).shape == (3, 0)


def test_result_does_not_depend_on_blocks():
    """There are more instances than fit into a block, and the last block is not full."""
    rng = np.random.default_rng(0)
    classes, instances = 300, 2 * (CELLS // 300) + 7
    spaces = [np.arange(classes)] * 3
    predictions = [rng.integers(0, 4, instances) for _ in spaces]
    joined = ours(classes, spaces, predictions, [1.0] * 3, 0.5)
    expected = algorithm_1(predictions, spaces, range(classes), 0.5, instances, [1.0] * 3)
    assert all(set(np.flatnonzero(joined[c])) == expected[c] for c in range(classes))


# --- abstentions ----------------------------------------------------------------------------


@pytest.mark.parametrize("block", range(3))
def test_abstention_adds_no_vote_and_counts_in_the_total(block):
    decided = 0
    for seed in range(300 * block, 300 * (block + 1)):
        classes, spaces, predictions, weights, alpha, instances = drawn(seed)
        rng = np.random.default_rng([seed, 1])
        silent = [rng.random(instances) < 0.4 for _ in spaces]
        said = [np.where(s, classes, p) for s, p in zip(silent, predictions, strict=True)]
        literal = [
            [None if none else int(c) for none, c in zip(s, p, strict=True)]
            for s, p in zip(silent, predictions, strict=True)
        ]
        every = sorted({int(c) for space in spaces for c in space})
        expected = algorithm_1(literal, spaces, every, alpha, instances, weights)
        joined = ours(classes + 1, spaces, said, weights, alpha)[:classes]
        votes = [Vote(p, s, w) for p, s, w in zip(said, spaces, weights, strict=True)]
        assert np.array_equal(aggregate(votes, classes, alpha), joined)
        for c in range(classes):
            assert set(np.flatnonzero(joined[c])) == expected.get(c, set()), seed
        alone = algorithm_1(predictions, spaces, every, alpha, instances, weights)
        decided += alone != expected
    assert decided > 50, "abstaining makes no difference here"


def test_models_abstain_if_the_two_best_classes_are_close():
    probabilities = np.array(
        [[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.0, 0.25, 0.75], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]
    )
    assert undecided(probabilities, 0.25).tolist() == [True, True, False, True, False]
    assert undecided(probabilities, 0.2).tolist() == [False, False, False, True, False]
    assert undecided(probabilities, 0.5).tolist() == [True, True, True, True, False]
    with pytest.raises(ValueError, match=r"classes.*1"):
        undecided(probabilities[:, :1], 0.5)


@settings(max_examples=50)
@given(seed=st.integers(0, 10_000), margin=st.sampled_from([0.01, 0.3, 0.7, 0.99]))
def test_published_rule(seed, margin):
    """`maxk(y, 2)`, then keep where their difference is below -margin (sorted, best first)."""
    probabilities = np.random.default_rng(seed).dirichlet(np.ones(4) * 0.3, 20)
    kept = [max(p) - sorted(p)[-2] > margin for p in probabilities.tolist()]
    assert undecided(probabilities, margin).tolist() == [not k for k in kept]
