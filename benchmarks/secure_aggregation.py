"""Cost of a round of secure aggregation, compared with plain averaging.

    python -m benchmarks.secure_aggregation --sites 10,50 --values 1,5

The benchmark runs the code of the sites and the server for a synthetic model of --values million
weights. It creates masked replies (which sites also write to disk), shares, and the unmasked
average. The server reads the replies from disk, as in a deployment. The table contains the seconds
of one core, the bytes per site and round, and the error of the average with its bound.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from flwr.common import Code, GetPropertiesRes, Status, ndarrays_to_parameters

from fedhet.algorithms.weights import RunningAverage
from fedhet.base.arrays import Array, OnDemand
from fedhet.client_runtime.masking import Masking
from fedhet.client_runtime.node import Node
from fedhet.config.resolve import resolve
from fedhet.config.secure import simulated_peers
from fedhet.data.store import RunData
from fedhet.runs.measures import Measured
from fedhet.server.members import Member
from fedhet.server.reply import Reply
from fedhet.server.round import RoundState
from fedhet.server.unmasking import Unmasking
from fedhet.wire.contract import Sizes
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Envelope, Knowledge, encode, payload_bytes
from fedhet.wire.masking import NARROW_BITS

CAP, TENSOR = 1000, 2**18
"""Maximum weight of a site, and maximum number of values per tensor."""


class Cost(NamedTuple):
    """Measurements of one round."""

    site: float
    plain_site: float
    server: float
    plain_server: float
    bytes_up: int
    plain_bytes_up: int
    extra_bytes: int
    error: float
    bound: float


class Site:
    """A site with random weights, and the server's connection to it."""

    def __init__(self, masking: Masking, info: ClientInfo, samples: int, index: int) -> None:
        self.masking, self.info, self.samples, self._index = masking, info, samples, index
        self.revealed_bytes, self.seconds = 0, 0.0

    def weights(self, values: int) -> dict[str, Array]:
        """Return the weights of the site's model. Each call returns equal weights."""
        rng, left = np.random.default_rng(self._index), range(0, values, TENSOR)
        return {
            f"weights/{start}": rng.normal(0, 0.1, min(TENSOR, values - start)).astype(np.float32)
            for start in left
        }

    def get_properties(self, ins: Any, timeout: float, group: int) -> GetPropertiesRes:
        """Return the shares that unmask the sum."""
        started = time.thread_time()  # The server calls sites from several threads.
        answer = self.masking.revealed(ins.config)
        self.seconds += time.thread_time() - started
        sizes = (len(each) for each in (*ins.config.values(), *answer.values()))
        self.revealed_bytes = sum(sizes)
        return GetPropertiesRes(Status(Code.OK, ""), answer)


def round_of(sites: int, values: int, lost: int, directory: Path) -> Cost:
    """Run a round with `lost` sites that fail before their replies, and measure it."""
    config = resolve(
        {"method": "fedavg", "clients": sites, "privacy.secure-aggregation": True, "rounds": 1}
    )
    names = [f"site-{k:02d}" for k in range(sites)]
    rng, members = np.random.default_rng(0), dict[str, Site]()
    weights = {name: int(rng.integers(CAP // 2, CAP + 1)) for name in names}
    peers, keys = simulated_peers(names, weights=weights)
    for k, name in enumerate(names):
        info = ClientInfo(name, "cnn2", weights[name], 10, "image", (1, 8, 8))
        node = Node(
            name, k, "", "cnn2", config.run.training, "cpu", directory / "sites",
            RunData.for_run(config.run), peers=peers, peers_key=keys[name],
        )  # fmt: skip
        members[name] = Site(Masking(config, node, info), info, info.samples, k)
    shapes = {
        str(start): ((min(TENSOR, values - start),), "float32")
        for start in range(0, values, TENSOR)
    }
    notices: list[str] = []
    state = RoundState(1, notices.append)
    state.start(1)
    sizes = Sizes({}, {"weights": shapes})
    step = Unmasking(config, directory.name, state, directory, 60.0)
    step.start(1, {name: Member(site.info, site) for name, site in members.items()}, names)  # type: ignore[arg-type]

    replies, seconds, plain_seconds, up, plain_up = [], list[float](), list[float](), 0, 0
    plain, samples = RunningAverage(), 0
    plain_server = 0.0
    for name in names[: sites - lost]:
        site, sent = members[name], members[name].weights(values)
        started = time.process_time()
        message = encode(Envelope(directory.name, "fedavg", 1, name), Knowledge(sent))
        plain_up = payload_bytes(ndarrays_to_parameters(message))
        plain_seconds.append(time.process_time() - started)
        envelope, started = Envelope(directory.name, "fedavg", 1, name), time.process_time()
        site.masking.begin(envelope, Knowledge({}, {}), step.config(name))
        masked = site.masking.masked(envelope, Knowledge(sent))
        message = site.masking.store(envelope, encode(envelope, masked))
        up = payload_bytes(ndarrays_to_parameters(message))
        seconds.append(time.process_time() - started)
        replies.append(Reply(site.info, _on_disk(masked, directory / name), Measured({})))
        started, samples = time.process_time(), samples + site.samples
        plain.add(sent, site.samples)
        plain_server += time.process_time() - started
    started = time.process_time()
    (total,) = step(replies, lambda info: sizes)
    of_sites = sum(site.seconds for site in members.values())
    server = time.process_time() - started - of_sites
    assert not notices, notices
    mean, found = plain.mean(), total.knowledge.tensors
    error = max(float(np.abs(found[name] - mean[name]).max()) for name in mean)
    fraction = NARROW_BITS - int(np.ceil(np.log2(sites)))
    # The maximum error of rounding to fixed point; rounding the averages to float32 adds to it.
    bound = len(replies) / 2 * 2.0**-fraction / (samples / peers.max_weight)
    extra = max(site.revealed_bytes for site in members.values())
    site_seconds = float(np.median(seconds)) + of_sites / len(replies)
    return Cost(
        site_seconds, float(np.median(plain_seconds)), server, plain_server, up, plain_up, extra,
        error, bound,
    )  # fmt: skip


def _on_disk(reply: Knowledge, folder: Path) -> Knowledge:
    """Write the tensors of a reply to files, and return the reply with tensors mapped from them."""
    sources = {}
    for name, value in reply.tensors.items():
        file = folder.with_suffix(f".{name.replace('/', '-')}.npy")
        np.save(file, value)
        sources[name] = lambda file=file: np.load(file, mmap_mode="r")
    return Knowledge(OnDemand(sources), reply.scalars)


def main() -> None:
    """Print a row for each combination of the numbers of sites, weights, and lost sites."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sites", default="10", help="numbers of sites, comma-separated")
    parser.add_argument("--values", default="1", help="millions of weights, comma-separated")
    parser.add_argument("--lost", action="store_true", help="lose as many sites as possible")
    options = parser.parse_args()
    head = (
        "sites", "lost", "weights", "site, s", "plain", "server, s", "plain", "MB up", "plain",
        "kB more", "error", "bound",
    )  # fmt: skip
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for sites in map(int, options.sites.split(",")):
        most = sites - simulated_peers(map(str, range(sites)))[0].threshold(sites)
        for millions in map(float, options.values.split(",")):
            for lost in dict.fromkeys((0, most if options.lost else 0)):
                with tempfile.TemporaryDirectory() as folder:
                    (run := Path(folder) / "run").mkdir()
                    cost = round_of(sites, int(millions * 1e6), lost, run)
                cells = (
                    f"{sites}", f"{lost}", f"{millions:g} M",
                    f"{cost.site:.2f}", f"{cost.plain_site:.2f}",
                    f"{cost.server:.2f}", f"{cost.plain_server:.2f}",
                    f"{cost.bytes_up / 1e6:.1f}", f"{cost.plain_bytes_up / 1e6:.1f}",
                    f"{cost.extra_bytes / 1e3:.1f}", f"{cost.error:.2g}", f"{cost.bound:.2g}",
                )  # fmt: skip
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
