"""The settings of how a run is executed: `[engine]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedhet.settings.address import RayAddress
from fedhet.settings.schema import (
    A_DEVICE,
    Count,
    CountOrNone,
    NonNegative,
    Positive,
    Schema,
    machine,
)


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
        "none", "where a run's metrics are sent, besides its own files (docs/trackers.md)"
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
        "on this machine (docs/cluster.md)",
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
    least_per_class: Count = Field(
        1,
        description="methods of class means: samples of a class below which a client does not "
        "send the class's means; with 1, the mean of a single sample is sent, which is that sample",
    )
    outlier_factor: NonNegative = Field(
        1000.0,
        description="a reply is refused if the root mean square of a field is more than this many "
        "times the other clients' median; 0 = never",
    )
    refusals: CountOrNone = Field(
        3,
        description="consecutive rounds with a refused reply after which a client is excluded; 0 = "
        "never",
    )
    silences: CountOrNone = Field(
        2,
        description="consecutive rounds without a reply after which a client is asked less and "
        "less often; 0 = it is asked in every round",
    )
    divergences: CountOrNone = Field(
        3,
        description="consecutive rounds in which the training of the server's own model diverges "
        "after which the run ends; 0 = never",
    )

    @model_validator(mode="after")
    def _only_ray_joins_a_cluster(self) -> EngineSettings:
        if self.ray_address and self.backend == "inline":
            raise ValueError(
                f"setting 'engine.ray-address' = {self.ray_address!r} is not allowed: it takes "
                f"nothing with 'engine.backend' = {self.backend!r}"
            )
        return self
