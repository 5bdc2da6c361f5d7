"""Settings for execution (`[engine]`), round timing (`[pace]`) and message encoding (`[wire]`).

The name "pace" follows Bonawitz et al., "Towards Federated Learning at Scale: System Design", MLSys
2019. Unlike most engine settings, the pace settings change the results of a run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from fedhet.settings.addresses import RayAddress
from fedhet.settings.schema import (
    A_DEVICE,
    Count,
    CountOrNone,
    Listed,
    NonNegative,
    Positive,
    Schema,
    Unique,
    invalid_setting,
    machine_field,
)


class ComputeSettings(Schema):
    """Settings for the device and the precision of computations."""

    device: Annotated[str, A_DEVICE] = machine_field(
        "auto", "compute device: auto, cpu, cuda, cuda:N, or mps"
    )
    precision: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="floating-point precision of training; auto = bfloat16 on GPUs with native "
        "support and on CPUs with AMX, otherwise float32. Simulations record the selected "
        "precision in config.toml",
    )
    channels_last: Literal["auto", "true", "false"] = machine_field(
        "auto", "whether images use the channels-last memory format; auto = true except on mps"
    )
    threads: Count = machine_field(1, "PyTorch threads per worker")
    eval_batch_size: CountOrNone = machine_field(
        0,
        "batch size of evaluation; 0 = derived from the size of the model's activations, from 32 "
        "to 1024 on a CPU and up to 8192 on an accelerator",
    )
    deterministic: bool = machine_field(
        True,
        "whether to use only deterministic GPU algorithms, so that repeated and resumed runs are "
        "bit-identical; false = allow faster, nondeterministic algorithms",
    )
    compile: bool = machine_field(
        False,
        "whether to compile local training steps with torch.compile (CUDA graphs on a GPU); "
        "faster for small networks on a GPU, after up to a minute of compilation per "
        "architecture",
    )
    base_precision: Literal["full", "nf4"] = machine_field(
        "full",
        "precision of the linear layers of frozen base models; full = engine.precision, nf4 = 4 "
        "bits, which needs an eighth of the memory of float32 and the package bitsandbytes",
    )
    gradient_checkpointing: bool = machine_field(
        False,
        "causal language models: whether to compute the activations of each layer again in the "
        "backward pass, which needs less memory and more time",
    )
    sample_mb: CountOrNone = machine_field(
        4096,
        "maximum size of the samples that a worker caches in GPU memory, in MB; limited to half "
        "of the free memory; other samples are copied batch by batch",
    )


class EngineSettings(ComputeSettings):
    """Settings for the execution of a run: backend, resources, timeouts and limits."""

    backend: Literal["auto", "ray", "inline"] = machine_field(
        "auto",
        "execution backend of simulations: this process (inline), or workers on this machine or a "
        "cluster (ray); auto = ray if it saves more than its start-up time, otherwise inline",
    )
    track: Annotated[tuple[Literal["wandb", "mlflow", "prometheus"], ...], Listed, Unique] = (
        machine_field(
            (),
            "experiment trackers that also receive the run's metrics (docs/guide.md); empty = none",
        )
    )
    strict: bool = machine_field(
        True,
        "whether a simulation stops if a client's custom code raises an error; false = "
        "exclude the client",
    )
    cpus_per_client: Positive = machine_field(1.0, "Ray: CPUs per worker")
    gpus_per_client: Annotated[float, Field(ge=0, le=1)] = machine_field(
        0.0,
        "Ray: fraction of a GPU and its memory per worker; 0 = derived from the size of the "
        "models, at least 1/8",
    )
    ray_address: RayAddress = machine_field(
        "",
        "address of an existing Ray cluster: auto (the cluster of this machine) or HOST:PORT; "
        "empty = start a local cluster (docs/operation.md)",
    )
    join_timeout: Positive = machine_field(
        120.0, "maximum time to wait for clients and cluster machines at the start, in seconds"
    )
    min_clients: CountOrNone = machine_field(
        0, "minimum number of clients to start a run after 'join-timeout'; 0 = all"
    )
    round_timeout: Positive = machine_field(
        3600.0,
        "time after which a round continues without the clients that have not replied, in seconds",
    )
    in_flight: CountOrNone = machine_field(
        0,
        "methods with large messages: maximum number of concurrent client calls, which limits the "
        "server's memory; 0 = number of workers, or all clients in a deployment",
    )
    max_payload_mb: Positive = machine_field(2048.0, "maximum size of a reply, in MB")
    samples_cap: NonNegative = Field(
        2.0,
        description="maximum number of samples that count toward a client's weight, as a multiple "
        "of the median over clients; 0 = no limit",
    )
    min_samples_per_class: Count = Field(
        1,
        description="methods based on class means: minimum number of samples in a class mean that "
        "a client sends; 1 = a mean may equal the features of a single sample",
    )
    outlier_factor: NonNegative = Field(
        1000.0,
        description="maximum root mean square of a field in a reply, as a multiple of the median "
        "over the other clients; a larger reply is rejected; 0 = no limit",
    )
    max_refusals: CountOrNone = Field(
        3,
        description="number of consecutive rounds with rejected replies until a client is "
        "excluded; 0 = never",
    )
    max_silences: CountOrNone = Field(
        2,
        description="number of consecutive rounds without a reply until a client is called less "
        "often (exponential backoff); 0 = no backoff",
    )
    max_divergences: CountOrNone = Field(
        3,
        description="number of consecutive rounds with divergent training of the server's model, "
        "or with a spoiled sum of secure aggregation, until the run stops; 0 = never",
    )

    @model_validator(mode="after")
    def _check_ray_address(self) -> EngineSettings:
        if self.ray_address and self.backend == "inline":
            expected = "an empty value with 'engine.backend' = 'inline'"
            raise invalid_setting("engine.ray-address", self.ray_address, expected)
        return self


NO_CLOCK, DRAWN_CLOCK = "none", "log-normal"
_TIMEOUT = re.compile(r"(\d+(?:\.\d+)?)(x?)")
MAX_TIMEOUT = 1e6
"""Maximum timeout, in seconds or as a multiple of the typical round duration."""


def _check_min_replies(value: float) -> float:
    if value > 1 and value != int(value):
        raise ValueError("expected a fraction > 0 and <= 1, or an integer >= 2")
    return value


def _check_timeout(value: str) -> str:
    match = _TIMEOUT.fullmatch(value)
    if value and (match is None or not 0 < float(match[1]) <= MAX_TIMEOUT):
        raise ValueError("expected seconds such as 600, or a multiple of a round such as 3x")
    return value


class PaceSettings(Schema):
    """Settings for closing rounds, late replies, client selection, and simulated speeds."""

    mode: Literal["synchronous", "asynchronous"] = Field(
        "synchronous",
        description="aggregation mode; synchronous = a round waits for its sampled clients; "
        "asynchronous (FedBuff) = aggregate whenever 'min-replies' replies have arrived, with "
        "lower weights for stale replies",
    )
    over_selection: Annotated[float, Field(ge=0, le=10)] = Field(
        0.0,
        description="number of additional clients to sample, as a fraction of the required "
        "clients, so that a round need not wait for the slowest client",
    )
    min_replies: Annotated[float, Field(gt=0, le=1e6), AfterValidator(_check_min_replies)] = Field(
        1.0,
        description="number of replies required to close a round; a value <= 1 is a fraction of "
        "the required clients",
    )
    grace: NonNegative = Field(
        0.0,
        description="time to wait for more replies after 'min-replies' replies have arrived, in "
        "seconds",
    )
    timeout: Annotated[str, AfterValidator(_check_timeout)] = Field(
        "",
        description="time after which a round closes regardless of the number of replies, in "
        "seconds or as a multiple of the typical round duration, such as 3x; empty = no limit",
    )
    max_age: CountOrNone = Field(
        100,
        description="maximum age of a late reply, in rounds; 0 = discard all late replies",
    )
    server_lr: Positive = Field(
        1.0, description="asynchronous: server learning rate (eta in FedBuff)"
    )
    select: Literal["random", "power-of-choice", "oort"] = Field(
        "random",
        description="client selection: uniformly at random (random), clients with the highest "
        "losses among candidates drawn in proportion to their sample counts (power-of-choice), or "
        "fast clients with high losses (oort)",
    )
    candidates: CountOrNone = Field(
        0,
        description="power-of-choice: number of candidates; 0 = twice the number of clients to "
        "select",
    )
    clock: str = Field(
        NO_CLOCK,
        description="clock of a simulation. none: real time; log-normal: simulated time with "
        "random speeds and bandwidths of clients; FILE: simulated time with the measured devices "
        "in a CSV file (docs/rounds.md)",
    )
    spread: Annotated[float, Field(ge=0, le=5)] = Field(
        1.0, description="clock = log-normal: standard deviation of the log speeds and bandwidths"
    )
    sample_ms: Positive = Field(
        1.0, description="clock = log-normal: median time per training sample, in ms"
    )
    mbit: Positive = Field(20.0, description="clock = log-normal: median bandwidth, in Mbit/s")
    drop_outs: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="simulation: probability that a sampled client drops out of a round",
    )
    stragglers: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="simulation: probability that a sampled client is a straggler in a round"
    )
    slowdown: Annotated[float, Field(ge=1, le=1000)] = Field(
        3.0, description="slowdown factor of stragglers"
    )

    @property
    def is_simulated(self) -> bool:
        """Whether rounds follow a simulated clock."""
        return self.clock != NO_CLOCK

    @property
    def is_asynchronous(self) -> bool:
        """Whether the server aggregates replies as they arrive, regardless of their round."""
        return self.mode == "asynchronous"

    @property
    def may_be_late(self) -> bool:
        """Whether a round can close before all of its clients have replied."""
        closes_early = self.over_selection > 0 or self.min_replies != 1 or bool(self.timeout)
        return self.is_asynchronous or closes_early

    def max_seconds(self, typical: float) -> float:
        """Return the timeout of a round in seconds, given a typical round duration in seconds."""
        match = _TIMEOUT.fullmatch(self.timeout)
        if match is None:
            return float("inf")
        return float(match[1]) * (typical if match[2] else 1.0)

    @model_validator(mode="after")
    def _check_dependencies(self) -> PaceSettings:
        if self.server_lr != 1 and not self.is_asynchronous:
            expected = "1 unless 'pace.mode' is asynchronous"
            raise invalid_setting("pace.server-lr", self.server_lr, expected)
        if self.candidates and self.select != "power-of-choice":
            expected = "0 unless 'pace.select' is power-of-choice"
            raise invalid_setting("pace.candidates", self.candidates, expected)
        return self


SIMULATED_ONLY: Mapping[str, Any] = {"clock": NO_CLOCK, "drop_outs": 0.0, "stragglers": 0.0}
"""Pace settings that only simulations support, with the values required in a deployment."""


class WireSettings(Schema):
    """Settings for the encoding of floating-point tensors in messages."""

    encoding: Literal["float32", "float16", "int8", "top-k"] = Field(
        "float32",
        description="encoding of weights and other large tensors: none (float32), half precision "
        "(float16), stochastic rounding to one byte (int8), or only the largest changes of "
        "clients' weights, with error feedback (top-k)",
    )
    keep: Annotated[float, Field(gt=0, le=0.5)] = Field(
        0.15,
        description="top-k: fraction of each tensor's changes that is sent; a bit mask adds one "
        "bit per element",
    )
    resend: bool = Field(
        True,
        description="whether to resend weights to a client that already has them; does not change "
        "the results",
    )
