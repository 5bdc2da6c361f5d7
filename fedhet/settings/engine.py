"""The settings of how a run is executed: `[engine]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedhet.settings.address import RayAddress
from fedhet.settings.schema import (
    Count,
    CountOrNone,
    NonNegative,
    Positive,
    Schema,
    machine,
)


class ComputeSettings(Schema):
    """The device and precision of computations."""

    device: str = machine("auto", "auto, cpu, cuda, cuda:N or mps")
    precision: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="auto is bfloat16 on a GPU that has it and on a processor with AMX, else "
        "float32; a simulation's config.toml says what it was",
    )
    channels_last: Literal["auto", "true", "false"] = machine(
        "auto", "memory format of images; auto is channels-last but on mps"
    )
    threads: Count = machine(1, "torch threads a worker")
    eval_batch_size: CountOrNone = machine(
        0,
        "samples a batch in evaluation; 0: as many as suit a model's activations, 32 to 1024 on a "
        "processor, to 8192 on an accelerator",
    )


class EngineSettings(ComputeSettings):
    """How a run is executed: backend, resources, timeouts and limits."""

    backend: Literal["ray", "inline"] = machine(
        "ray", "Ray's workers, here or on a cluster (ray-address), or everything in this process"
    )
    track: Literal["none", "wandb", "mlflow"] = machine(
        "none", "where a run's numbers are sent beside its own files (docs/trackers.md)"
    )
    cpus_per_client: Positive = machine(1.0, "Ray: processors a worker takes")
    gpus_per_client: Annotated[float, Field(ge=0.01, le=1)] = machine(
        0.25, "Ray: share of a GPU a worker takes, where the device is one"
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
        0, "start with so many if the others do not come in time; 0 = all must come"
    )
    round_timeout: Positive = machine(
        3600.0, "seconds after which a round continues without missing clients"
    )
    in_flight: CountOrNone = machine(
        0,
        "clients asked at once where each is sent something large of its own, which bounds the "
        "server's memory; 0 = as many as there are workers, in a deployment all",
    )
    max_payload_mb: Positive = machine(2048.0, "a reply larger than this is refused, MB")
    samples_cap: NonNegative = Field(
        10.0,
        description="a client counts for at most so many times the samples of the median client, "
        "whatever it claims to have; 0 = no limit",
    )
    outlier_factor: NonNegative = Field(
        1000.0,
        description="a reply is refused if a field's root mean square is more than so many times "
        "the other clients' median; 0 = never",
    )
    refusals: CountOrNone = Field(
        3,
        description="consecutive rounds after which a client whose replies are refused is "
        "excluded; 0 = never",
    )
    silences: CountOrNone = Field(
        2,
        description="consecutive rounds after which a client that does not answer is asked only "
        "now and then; 0 = it is asked in every round",
    )
    drop_outs: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="in a simulation, the share of the asked clients that do not answer in a "
        "round, drawn for each client and round",
    )
    stragglers: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="in a simulation, the share of the asked clients that are slow in a round"
    )
    slowdown: Annotated[float, Field(ge=1, le=1000)] = Field(
        3.0, description="how many times as long a straggler takes"
    )
    divergences: CountOrNone = Field(
        3,
        description="consecutive rounds in which the training of the server's own model diverges, "
        "after which the run ends; 0 = never",
    )

    @model_validator(mode="after")
    def _only_ray_joins_a_cluster(self) -> EngineSettings:
        if self.ray_address and self.backend != "ray":
            raise ValueError(
                f"setting 'engine.ray-address' = {self.ray_address!r} is not allowed: it takes "
                f"nothing with 'engine.backend' = {self.backend!r}"
            )
        return self
