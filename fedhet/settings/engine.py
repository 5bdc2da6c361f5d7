"""How a run is executed, when its rounds close, and how messages are encoded.

The tables `[engine]`, `[pace]`, and `[wire]`. The name pace is from Bonawitz et al., Toward
Federated Learning at Scale: System Design, MLSys 2019; its settings change what a run computes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from fedhet.settings.schema import (
    A_DEVICE,
    Count,
    CountOrNone,
    NonNegative,
    Positive,
    Schema,
    machine,
    refused,
)
from fedhet.settings.text import RayAddress


class ComputeSettings(Schema):
    """The device and precision of computations."""

    device: Annotated[str, A_DEVICE] = machine("auto", "auto, cpu, cuda, cuda:N or mps")
    precision: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="auto is bfloat16 on a GPU that has it and on a processor with AMX, else "
        "float32; a simulation's config.toml says what it was",
    )
    channels_last: Literal["auto", "true", "false"] = machine(
        "auto", "memory format of images; auto is channels-last except on mps"
    )
    threads: Count = machine(1, "PyTorch's threads in a worker")
    eval_batch_size: CountOrNone = machine(
        0,
        "samples of a batch in evaluation; 0 = by the size of a model's activations, from 32 to "
        "1024 on a processor, and up to 8192 on an accelerator",
    )
    deterministic: bool = machine(
        True,
        "on a GPU, only algorithms that give the same bits each time, as processors do; false lets "
        "CUDA choose faster ones, and a repeated or resumed run is then equal within noise",
    )
    compile: bool = machine(
        False,
        "torch.compile makes the steps of local training, on a GPU as CUDA graphs, for networks so "
        "small that launching takes longer than computing; it takes up to a minute for each "
        "architecture, does not pay on a processor, and is equal but for rounding",
    )
    sample_mb: CountOrNone = machine(
        4096,
        "on a GPU, MB of samples that a worker keeps there, as far as half of the free memory "
        "reaches; the batches of further samples are copied one by one",
    )


class EngineSettings(ComputeSettings):
    """How a run is executed: backend, resources, timeouts and limits."""

    backend: Literal["auto", "ray", "inline"] = machine(
        "auto",
        "ray: workers on this machine or on a cluster (ray-address); inline: all in this process; "
        "auto: inline if starting Ray takes longer than it saves (docs/performance.md)",
    )
    track: Literal["none", "wandb", "mlflow", "prometheus"] = machine(
        "none", "where a run's metrics are sent, besides its own files (docs/guide.md)"
    )
    strict: bool = machine(
        True, "in a simulation, whether an error of a client's own code ends the run"
    )
    cpus_per_client: Positive = machine(1.0, "Ray: processors of a worker")
    gpus_per_client: Annotated[float, Field(ge=0, le=1)] = machine(
        0.0,
        "Ray: share of a GPU of a worker, and of its memory, where the device is a GPU; 0 = by the "
        "size of the models, an eighth at least",
    )
    ray_address: RayAddress = machine(
        "",
        "a Ray cluster to join: auto (this machine's) or HOST:PORT; empty = a cluster of its own "
        "on this machine (docs/operation.md)",
    )
    join_timeout: Positive = machine(
        120.0, "seconds to wait at the start for all clients, and for the machines of a cluster"
    )
    min_clients: CountOrNone = machine(
        0, "number of clients with which a run starts if the others do not join in time; 0 = all"
    )
    round_timeout: Positive = machine(
        3600.0, "seconds after which a round continues without missing clients"
    )
    in_flight: CountOrNone = machine(
        0,
        "number of clients asked at once by a method that sends each something large of its own, "
        "which bounds the server's memory; 0 = the number of workers, in a deployment all clients",
    )
    max_payload_mb: Positive = machine(2048.0, "size in MB above which a reply is refused")
    samples_cap: NonNegative = Field(
        10.0,
        description="maximum number of samples for which a client counts, in times of the median "
        "client's, whatever it claims to have; 0 = no limit",
    )
    min_samples_per_class: Count = Field(
        1,
        description="methods of class means: samples of a class below which a client does not "
        "send the class's means; with 1, the mean of a single sample is sent, which is that sample",
    )
    outlier_factor: NonNegative = Field(
        1000.0,
        description="a reply is refused if the root mean square of a field is more than this many "
        "times the other clients' median; 0 = never",
    )
    max_refusals: CountOrNone = Field(
        3,
        description="consecutive rounds with a refused reply after which a client is excluded; 0 = "
        "never",
    )
    max_silences: CountOrNone = Field(
        2,
        description="consecutive rounds without a reply after which a client is asked less and "
        "less often; 0 = it is asked in every round",
    )
    max_divergences: CountOrNone = Field(
        3,
        description="consecutive rounds in which the training of the server's own model diverges "
        "after which the run ends; 0 = never",
    )

    @model_validator(mode="after")
    def _only_ray_joins_a_cluster(self) -> EngineSettings:
        if self.ray_address and self.backend == "inline":
            rule = f"nothing with 'engine.backend' = {self.backend!r}"
            raise refused("engine.ray-address", self.ray_address, rule)
        return self


NO_CLOCK, DRAWN_CLOCK = "none", "log-normal"
_TIMEOUT = re.compile(r"(\d+(?:\.\d+)?)(x?)")
LONGEST = 1e6
"""The longest timeout, in seconds or in times of the usual round."""


def _enough(value: float) -> float:
    if value > 1 and value != int(value):
        raise ValueError("it takes a share > 0 and <= 1, or a number of clients from 2")
    return value


def _timeout(value: str) -> str:
    found = _TIMEOUT.fullmatch(value)
    if value and (found is None or not 0 < float(found[1]) <= LONGEST):
        raise ValueError("it takes seconds, such as 600, or times of the usual round, such as 3x")
    return value


class PaceSettings(Schema):
    """When a round closes, what late answers are worth, and which clients are asked."""

    mode: Literal["synchronous", "asynchronous"] = Field(
        "synchronous",
        description="synchronous: a round waits for the clients sampled in it; asynchronous "
        "(FedBuff): every 'min-replies' replies, from any round, form the next version; older "
        "replies have less weight",
    )
    over_selection: Annotated[float, Field(ge=0, le=10)] = Field(
        0.0,
        description="share of clients that are asked in addition to 'fraction', so that a round "
        "need not wait for the slowest",
    )
    min_replies: Annotated[float, Field(gt=0, le=1e6), AfterValidator(_enough)] = Field(
        1.0,
        description="answers with which a round closes: up to 1 a share of 'fraction' of the "
        "clients, from 2 on a number",
    )
    grace: NonNegative = Field(
        0.0, description="seconds for which a round waits for further answers when it has enough"
    )
    timeout: Annotated[str, AfterValidator(_timeout)] = Field(
        "",
        description="when a round closes, however few have answered: seconds, or times of the "
        "usual round, such as 3x; empty = when it has enough",
    )
    max_age: CountOrNone = Field(
        100,
        description="rounds after which a late answer is not used any more; 0 = none is used",
    )
    server_lr: Positive = Field(
        1.0, description="asynchronous: factor of the mean change of the weights (eta of FedBuff)"
    )
    select: Literal["random", "power-of-choice", "oort"] = Field(
        "random",
        description="how a round's clients are chosen: at random, those with the highest loss of "
        "some drawn by their numbers of samples, or by loss and speed (Oort)",
    )
    candidates: CountOrNone = Field(
        0, description="power-of-choice: clients that are drawn; 0 = twice as many as are chosen"
    )
    clock: str = Field(
        NO_CLOCK,
        description="the clock of a simulation: none is this machine's; log-normal: each client's "
        "speed and bandwidth are drawn; or a CSV file of measured devices (docs/rounds.md)",
    )
    spread: Annotated[float, Field(ge=0, le=5)] = Field(
        1.0, description="clock = log-normal: standard deviation of the logarithms"
    )
    sample_ms: Positive = Field(
        1.0, description="clock = log-normal: median of the milliseconds per training sample"
    )
    mbit: Positive = Field(
        20.0, description="clock = log-normal: median of the bandwidth, in Mbit per second"
    )
    drop_outs: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="in a simulation, the share of the asked clients that do not reply in a round, "
        "drawn for each client and round",
    )
    stragglers: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="in a simulation, the share of the asked clients that are slow in a round"
    )
    slowdown: Annotated[float, Field(ge=1, le=1000)] = Field(
        3.0, description="factor by which a straggler takes longer"
    )

    @property
    def is_simulated(self) -> bool:
        """Return whether rounds close by a simulated clock."""
        return self.clock != NO_CLOCK

    @property
    def is_asynchronous(self) -> bool:
        """Return whether answers of any round make the next version."""
        return self.mode == "asynchronous"

    @property
    def may_be_late(self) -> bool:
        """Return whether rounds may close before all that were asked have answered."""
        closes_early = self.over_selection > 0 or self.min_replies != 1 or bool(self.timeout)
        return self.is_asynchronous or closes_early

    def seconds_at_most(self, usual: float) -> float:
        """Return the seconds after which a round closes, if the usual round takes `usual`."""
        found = _TIMEOUT.fullmatch(self.timeout)
        if found is None:
            return float("inf")
        return float(found[1]) * (usual if found[2] else 1.0)

    @model_validator(mode="after")
    def _what_needs_another(self) -> PaceSettings:
        if self.server_lr != 1 and not self.is_asynchronous:
            rule = "1 unless 'pace.mode' is asynchronous"
            raise refused("pace.server-lr", self.server_lr, rule)
        if self.candidates and self.select != "power-of-choice":
            rule = "0 unless 'pace.select' is power-of-choice"
            raise refused("pace.candidates", self.candidates, rule)
        return self


SIMULATED_ONLY: Mapping[str, Any] = {"clock": NO_CLOCK, "drop_outs": 0.0, "stragglers": 0.0}
"""The settings of simulations alone, by field, with the value that a deployment takes."""


class WireSettings(Schema):
    """How the floating-point tensors of messages are encoded."""

    encoding: Literal["float32", "float16", "int8", "top-k"] = Field(
        "float32",
        description="how weights and other large tensors travel: as they are; in half precision; "
        "as integers of one byte, rounded at random without bias; or, of weights that a client "
        "sends, the largest changes alone, while the rest is added to its next ones. Other than "
        "with float32, weights travel as differences",
    )
    keep: Annotated[float, Field(gt=0, le=0.5)] = Field(
        0.15,
        description="top-k: share of each tensor's changes that is sent; besides, each number "
        "costs one bit",
    )

    resend: bool = Field(
        True,
        description="float32: whether weights are sent to a client that has them already; no "
        "number depends on it. With the other encodings they never are",
    )
