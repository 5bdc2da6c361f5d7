"""A federation on a Ray of the run's own, by Flower's simulation."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from flwr.server import ServerApp, ServerAppComponents

from fedhet import data
from fedhet.client_app import simulated_app
from fedhet.config.resolve import Config, absolute
from fedhet.data.decoded import write_decoded
from fedhet.devices import find_device
from fedhet.settings.schema import refused


def set_up_ray() -> None:
    """Set what Ray reads from the environment when it is imported."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's future default: a worker without a GPU share still sees all GPUs.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def run_on_ray(
    config: Config, directory: Path, state_dir: Path, parts: ServerAppComponents
) -> None:
    """Run the federation; its clients keep their states in `state_dir`."""
    from flwr.simulation import run_simulation

    set_up_ray()
    with _decoded(config, directory) as decoded:
        run_simulation(
            server_app=ServerApp(server_fn=lambda context: parts),
            client_app=simulated_app(absolute(config), str(state_dir), decoded),
            num_supernodes=config.run.clients,
            backend_config=own_ray(config),
        )


@contextlib.contextmanager
def _decoded(config: Config, directory: Path) -> Iterator[Path]:
    """Have the run's data in a folder, from which the workers map it, inside the block."""
    folder = directory / "decoded"
    write_decoded(data.DataSpec.of(config.run), folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def own_ray(config: Config) -> dict[str, dict[str, Any]]:
    """Return what Flower passes to Ray: one of the run's own, though there may be a cluster."""
    # Without an address Ray joins a cluster that runs on this machine, or is in RAY_ADDRESS.
    return {
        "init_args": {"address": "local", "include_dashboard": False, "log_to_driver": False},
        "client_resources": {
            "num_cpus": config.run.engine.cpus_per_client,
            "num_gpus": _gpu_share(config),
        },
    }


def _gpu_share(config: Config) -> float:
    if find_device(config.run.engine.device).type != "cuda":
        return 0.0
    return config.run.engine.gpus_per_client


def ray_workers(config: Config) -> int:
    """Return Ray's number of workers. Raises SettingsError if no worker would fit."""
    engine = config.run.engine
    cpus = os.cpu_count() or 1
    if engine.cpus_per_client > cpus:
        raise refused(
            "engine.cpus-per-client", engine.cpus_per_client, f"at most this machine's {cpus}"
        )
    workers = int(cpus / engine.cpus_per_client)
    refuse_numbered_gpu(config)
    if share := _gpu_share(config):
        # A worker cannot use parts of two GPUs.
        workers = min(workers, torch.cuda.device_count() * int(1 / share))
    return max(1, min(workers, config.run.clients))


def refuse_numbered_gpu(config: Config) -> None:
    """Raise SettingsError if `engine.device` is a GPU with a number, which Ray cannot give."""
    if (device := config.run.engine.device).startswith("cuda:"):
        rule = "cuda on Ray, which deals the GPUs of CUDA_VISIBLE_DEVICES to its workers"
        raise refused("engine.device", device, rule)
