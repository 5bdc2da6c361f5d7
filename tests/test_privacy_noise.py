"""Secret noise and Poisson samples: distributions, keys, attacks, and sources of noise."""

import ast
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from rounds import opened, replied
from test_privacy_clients import private

import fedhet
from fedhet.client_runtime import privacy as promises
from fedhet.privacy.noise import Grid, SecretNoise
from fedhet.wire.knowledge import Knowledge

KEY = bytes(range(32))
MANY = 400_000


def gaussians(count, key=KEY, noise=1.0, norm=1.0):
    zeros, grid = torch.zeros(count, dtype=torch.int64), Grid(norm, count)
    return SecretNoise(key).add([zeros], noise, grid)[0].double().numpy()


# The distribution


def test_noise_is_gaussian_in_its_center_its_moments_and_its_tails():
    found = gaussians(MANY)
    assert scipy.stats.kstest(found, "norm").pvalue > 1e-3
    assert abs(found.mean()) < 4 / MANY**0.5
    assert found.std() == pytest.approx(1, abs=4 / (2 * MANY) ** 0.5)
    assert abs(scipy.stats.skew(found)) < 4 * (6 / MANY) ** 0.5
    assert abs(scipy.stats.kurtosis(found)) < 4 * (24 / MANY) ** 0.5
    for bound in (2, 3, 4):
        expected = 2 * scipy.stats.norm.sf(bound) * MANY
        assert abs((np.abs(found) > bound).sum() - expected) < 4 * expected**0.5 + 1


@pytest.mark.slow
def test_tails_are_gaussian_beyond_four_standard_deviations():
    draws, count = SecretNoise(KEY), 50_000_000
    zeros = torch.zeros(10**6, dtype=torch.int64)
    found = np.concatenate(
        [draws.add([zeros], 1.0, Grid(1.0))[0].numpy() for _ in range(count // 10**6)]
    )
    for bound in (4, 4.5, 5, 5.5):
        for tail in ((found > bound).sum(), (found < -bound).sum()):
            expected = scipy.stats.norm.sf(bound) * count
            assert abs(tail - expected) < 4 * expected**0.5 + 1
    tail = found[found > 4].astype(np.float64)
    uniform = scipy.stats.norm.sf(tail) / scipy.stats.norm.sf(4)
    assert scipy.stats.kstest(uniform, "uniform").pvalue > 1e-3


def test_tail_ends_at_nine_standard_deviations(monkeypatch):
    """The smallest radius of 63 bits is 2**-64; at angle 0 it is the largest number."""
    draws = SecretNoise(KEY)
    monkeypatch.setattr(draws, "_bits", lambda count: torch.zeros(count, dtype=torch.int64))
    assert float(draws._gaussians(2, torch.device("cpu"))[0]) == pytest.approx(
        np.sqrt(128 * np.log(2))
    )


def test_draws_within_a_call_and_between_calls_are_independent():
    draws = SecretNoise(KEY)
    first, second = (
        draws.add([torch.zeros(50_001, dtype=torch.int64)], 1.0, Grid(1.0))[0].numpy()
        for _ in range(2)
    )
    for one, other in [(first, second), (first[1:], first[:-1]), (first[:25_000], first[25_000:-1]),
                       (first[:8192], first[8192:16384])]:  # fmt: skip
        for view in (lambda x: x, np.abs):
            correlation = np.corrcoef(view(one), view(other))[0, 1]
            assert abs(correlation) < 4 / len(one) ** 0.5
    # A pair of Box and Muller shares its radius: its squares must be uncorrelated, too.
    assert abs(np.corrcoef(first[:8192] ** 2, first[8192:16384] ** 2)[0, 1]) < 4 / 8192**0.5


@pytest.mark.parametrize(("noise", "norm"), [(0.5, 1e-9), (7.0, 5.0), (1.3, 1e6)])
def test_noise_has_its_width_on_a_fine_grid(noise, norm):
    found = gaussians(100_000, noise=noise, norm=norm)
    assert found.std() == pytest.approx(noise * norm, rel=4 / (2 * 100_000) ** 0.5)
    assert np.sqrt(100_000) * grid_of(found) <= norm / 2**14
    assert grid_of(found) == Grid(norm, 100_000).step


def grid_of(values):
    """Return the largest power of two that divides all values."""
    width = 2.0 ** np.ceil(np.log2(np.abs(values).max()))
    while (values % width).any():
        width /= 2
    return width


def test_values_are_rounded_to_a_grid_that_hides_their_last_bits():
    """Two values that differ by less than the grid have bit-for-bit equal noised sums."""
    grid, values = Grid(1.0, 1000), torch.full((1, 1000), 1 / 60)
    first, second = (
        SecretNoise(KEY).add(grid.sum_all([each]), 2.0, grid)[0] for each in (values, values + 1e-8)
    )
    assert torch.equal(first, second)
    assert grid_of(first.double().numpy()) == grid.step > 1e-6


def test_noised_sums_keep_their_shapes_and_without_noise_their_values():
    sums = [torch.randint(-(10**6), 10**6, shape) for shape in ((3, 4), (5,), ())]
    for noise in (1e-9, 0.0):
        found = SecretNoise(KEY).add(sums, noise, grid := Grid(3.0, 18))
        assert [each.shape for each in found] == [each.shape for each in sums]
        assert all(torch.equal(a, b * grid.step) for a, b in zip(found, sums, strict=True))


def test_noise_is_added_exactly_to_sums_beyond_the_integers_of_floating_point():
    """Differences of one step between large sums remain."""
    large = torch.tensor([2**61, 2**61 + 1, -(2**61)])
    added = []
    draws = SecretNoise(KEY)
    draws._gaussians = lambda count, device: torch.full((count,), 2.0**-14, dtype=torch.float64)
    original = torch.Tensor.double

    class Recorded:
        @staticmethod
        def double(tensor):
            if tensor.dtype == torch.int64:
                added.append(tensor.clone())
            return original(tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "double", Recorded.double)
        draws.add([large], 1.0, Grid(1.0))
    assert added[0].tolist() == [2**61 + 1, 2**61 + 2, 1 - 2**61]


@pytest.mark.parametrize("rate", [0.5, 0.037, 1 - 2**-20, 2e-4])
def test_poisson_samples_have_their_rate(rate):
    draws, rows, times = SecretNoise(KEY), 1000, 200
    chosen = [draws.sample(rows, rate).numpy() for _ in range(times)]
    total, expected = sum(map(len, chosen)), rate * rows * times
    assert abs(total - expected) < 4 * (expected * (1 - rate)) ** 0.5 + 1
    counts = np.bincount(np.concatenate(chosen), minlength=rows)
    spread = (counts - rate * times) ** 2 / (times * rate * (1 - rate))
    assert scipy.stats.chi2.sf(spread.sum(), rows) > 1e-4
    sizes = np.array([len(each) for each in chosen])
    assert sizes.var() <= 1.6 * rows * rate * (1 - rate) + 0.1


def test_rate_of_a_sample_is_never_above_what_is_accounted(monkeypatch):
    """The lowest and highest accepted integers are those of the rate, rounded down."""
    draws = SecretNoise(KEY)
    for rate in (0.1, 1 / 3, 2**-64, 1e-300, 1 - 2**-53):
        bound = int(rate * 2**64) - 2**63
        edge = torch.tensor([-(2**63), max(bound - 1, -(2**63)), bound])
        monkeypatch.setattr(draws, "_bits", lambda count, edge=edge: edge)
        expected = [0, 1] if int(rate * 2**64) else []
        assert draws.sample(3, rate).tolist() == expected
    assert SecretNoise(KEY).sample(4, 1.0).tolist() == [0, 1, 2, 3]


# The key


def test_bits_equal_aes_256_in_counter_mode():
    """NIST SP 800-38A, F.5.5, shifted: the first block of the zero counter encrypts zeros."""
    found = SecretNoise(bytes(32))._bits(2).numpy().tobytes()
    assert found.hex() == "dc95c078a2408989ad48a21492842087"  # AES-256, key 0, block 0


def test_keys_that_differ_in_one_bit_give_unrelated_noise():
    count = 2000
    first = gaussians(count)
    others = []
    for bit in range(256):
        key = bytearray(KEY)
        key[bit // 8] ^= 1 << bit % 8
        others.append(gaussians(count, bytes(key)))
    correlations = np.corrcoef([first, *others])
    np.fill_diagonal(correlations, 0)
    assert np.abs(correlations).max() < 6 / count**0.5
    assert not any(np.isin(first, other).mean() > 0.02 for other in others)


def test_every_stream_has_its_own_key():
    streams = [SecretNoise().add([torch.zeros(8).long()], 1.0, Grid(1.0))[0] for _ in range(20)]
    assert len({tuple(each.tolist()) for each in streams}) == 20


# The attack: a search for the seed


class SeededNoise:
    """The noise of earlier versions: PyTorch's CPU generator with 32 bits of seed."""

    seed = 7 * 2**32 + 3021

    def __init__(self):
        self.draws = torch.Generator().manual_seed(self.seed)

    def add(self, sums, noise, grid):
        return [
            grid.step * each + noise * grid.norm * torch.randn(each.shape, generator=self.draws)
            for each in sums
        ]


def seeds_found(reply, seeds):
    """Return the seeds whose first draws explain the noisy features of the first class."""
    row = int(reply["classes"][0])
    sums = torch.tensor(reply["features"][0] * reply["counts"][0], dtype=torch.float32)
    width, found = len(sums), []
    observed = (sums - sums.mean()) / sums.std()
    draws, drawn = torch.Generator(), torch.empty(4096, (row + 1) * width)
    for start in range(0, seeds, len(drawn)):
        for number, each in enumerate(drawn):
            draws.manual_seed(start + number)
            each.normal_(generator=draws)
        own = drawn[:, row * width :]
        own = (own - own.mean(1, keepdim=True)) / own.std(1, keepdim=True)
        likeness = own @ observed / (width - 1)
        found += (start + (likeness > 0.85).nonzero().flatten()).tolist()
    return found


def reply_of_felo(tmp_path):
    own = {"noise-multiplier": 1.0, "class-noise": 7.0, "count-noise": 1.0}
    config = private("felo", **{f"privacy.{name}": value for name, value in own.items()})
    return replied(opened(config, tmp_path), 1, Knowledge()).tensors


def test_search_finds_the_seed_of_earlier_noise(tmp_path, monkeypatch):
    monkeypatch.setattr(promises, "SecretNoise", SeededNoise)
    assert seeds_found(reply_of_felo(tmp_path), 4096) == [3021]


@pytest.mark.slow
def test_search_of_a_million_seeds_finds_nothing(tmp_path):
    assert seeds_found(reply_of_felo(tmp_path), 2**20) == []


# Where noise may come from

DRAWING = {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal",
    "normal_", "uniform_", "bernoulli", "bernoulli_", "multinomial", "poisson", "exponential_",
    "cauchy_", "log_normal_", "geometric_", "random_", "manual_seed", "seed", "default_rng",
    "RandomState", "distributions", "optimizers", "DPOptimizer", "SystemRandom", "_generate_noise",
}  # fmt: skip
SOURCES = {"random", "fedhet.base.seeding", "numpy.random", "torch.random", "torch.distributions"}
PRIVATE_PATH = [
    *sorted((Path(fedhet.__file__).parent / "privacy").glob("*.py")),
    Path(promises.__file__),
]


def drawing(source):
    """Return the names in a module that could draw from generators other than `SecretNoise`."""
    # `fork_rng` keeps the state of PyTorch's generators and draws nothing.
    source = source.replace("torch.random.fork_rng(", "kept(")
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [n.name for n in names if n.name in SOURCES]
                found += [n.name for n in names if DRAWING & set(n.name.split("."))]
            case ast.ImportFrom(module=module, names=names):
                found += [module] * (module in SOURCES)
                found += [n.name for n in names if n.name in DRAWING or n.name == "random"]
            case ast.Attribute(attr=name) if name in DRAWING or name == "random":
                found.append(name)
            case ast.Call(func=ast.Attribute(attr="Generator") | ast.Name(id="Generator")):
                found.append("Generator")
    return found


@pytest.mark.parametrize("path", PRIVATE_PATH, ids=lambda path: path.stem)
def test_no_module_on_the_private_path_draws_from_another_generator(path):
    assert drawing(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "x = torch.Generator('cpu').manual_seed(3)", "x = torch.Generator()",
        "from torch import Generator\nx = Generator()", "x = torch.randn(3)", "x.normal_()",
        "x = torch.normal(0.0, 1.0, (3,))", "x = torch.bernoulli(p)", "x = np.random.rand(3)",
        "from numpy.random import default_rng", "import random", "from numpy import random",
        "from fedhet.base.seeding import torch_generator", "import opacus.optimizers",
        "x = opacus.optimizers.DPOptimizer(o)", "x = torch.rand(9) < rate",
    ],
)  # fmt: skip
def test_module_that_draws_from_another_generator_is_found(line):
    source = (Path(fedhet.__file__).parent / "privacy" / "sgd.py").read_text()
    assert drawing(f"{source}\n{line}\n")
