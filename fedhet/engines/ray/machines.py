"""The machines of a Ray cluster: which may take clients, and asking each what it has.

Ray is imported where it is used: a run in one process does without it.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedhet.base.disk import Folder
from fedhet.base.errors import FedhetError, words_of
from fedhet.config.resolve import Config
from fedhet.data.sources import find_source, paths_of
from fedhet.data.texts import encoder_folder, encoder_parts, is_encoder
from fedhet.engines.ray import inspection
from fedhet.engines.ray.faults import faults
from fedhet.engines.ray.inspection import Answer, Question
from fedhet.learning.devices import find_device
from fedhet.models.user_model import is_user_model
from fedhet.runs.units import plural
from fedhet.settings.engine import EngineSettings
from fedhet.settings.schema import refused

REQUIRED = ("flwr", "torch", "torchvision", "pydantic", "sklearn", "safetensors", "flwr_datasets")
"""What must be installed on every machine; the code of fedhet itself is sent there."""


@dataclass(frozen=True)
class Machine:
    """A machine of the cluster, or more exactly one of Ray's nodes."""

    node: str
    """Ray's id of it."""
    address: str
    cpus: float
    gpus: float

    def workers(self, engine: EngineSettings, *, on_gpu: bool) -> int:
        """Return how many workers have room here."""
        by_processor = int(self.cpus / engine.cpus_per_client)
        if not on_gpu:
            return by_processor
        # A worker cannot use parts of two GPUs.
        return min(by_processor, int(self.gpus) * int(1 / (engine.gpus_per_client or 1)))


def running_machines() -> list[Machine]:
    """Return the machines that the cluster has now, sorted by address."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    hosts = Counter(node["NodeManagerAddress"] for node in nodes)
    found = []
    for node in nodes:
        host, name, has = node["NodeManagerAddress"], node["NodeID"], node["Resources"]
        address = host if hosts[host] == 1 else f"{host} (Ray's node {name[:8]})"
        found.append(Machine(name, address, has.get("CPU", 0.0), has.get("GPU", 0.0)))
    return sorted(found, key=lambda machine: (machine.address, machine.node))


def taking_clients(machines: Sequence[Machine], engine: EngineSettings) -> list[Machine]:
    """Return the machines with processors for a worker. Raises SettingsError if there is none."""
    able = [machine for machine in machines if machine.workers(engine, on_gpu=False)]
    if not able:
        most = max((machine.cpus for machine in machines), default=0.0)
        rule = f"at most {most:g}, the processors of Ray's largest machine"
        raise refused("engine.cpus-per-client", engine.cpus_per_client, rule)
    return able


def places(
    machines: Sequence[Machine], engine: EngineSettings, clients: int, *, on_gpu: bool
) -> list[Machine]:
    """Return a machine for each worker, in turn while they have room; at most one for each client.

    Raises FedhetError if there is room for none.
    """
    rooms = [machine.workers(engine, on_gpu=on_gpu) for machine in machines]
    turns = range(max(rooms, default=0))
    placed = [m for turn in turns for m, room in zip(machines, rooms, strict=True) if turn < room]
    if not placed:
        raise FedhetError(
            "no machine of the Ray cluster has a GPU that Ray knows of: `ray start` finds them by "
            "itself, or gets their number by --num-gpus"
        )
    return placed[:clients]


def modules_of(config: Config) -> list[str]:
    """Return the modules that a run's workers import by name: its method, models and dataset."""
    source, place = find_source(config.run.data.dataset)
    return [
        *[half.__module__ for half in (config.method.strategy, config.method.client)],
        *[name.partition(":")[0] for name in config.run.models.pool if is_user_model(name)],
        *([place.partition(":")[0]] if source.imports else []),
    ]


def question_of(config: Config, directory: Path) -> Question:
    """Return what a run needs of each machine. `config` has absolute paths."""
    run, names = config.run, config.run.models.pool
    encoders = [encoder_folder(encoder_parts(name)[2]) for name in names if is_encoder(name)]
    return Question(
        directory=str(directory),
        token=f".fedhet-{secrets.token_hex(8)}",
        device=find_device(run.engine.device).type,
        data=list(dict.fromkeys([*map(str, paths_of(run.data)), *encoders])),
        modules=list(dict.fromkeys([*REQUIRED, *modules_of(config)])),
    )


def check_machines(machines: Sequence[Machine], question: Question, patience: float) -> None:
    """Ask every machine what it has; `patience` is how long to wait for them, in seconds.

    Raises FedhetError if one of them lacks what the run needs. The lines of all machines are the
    error's notes, if there are several.
    """
    with _token(question):
        here, answers = inspection.inspect(question), _answers(machines, question, patience)
    found = faults(question, here, answers)
    lines = [line for some in found.values() for line in some]
    if len(lines) == 1:
        raise FedhetError(lines[0])
    if lines:
        error = FedhetError(
            f"{len(found)} of {plural(len(machines), 'machine')} of the Ray cluster cannot take "
            f"part, and nothing was trained; the first fault: {lines[0]}"
        )
        for line in lines:
            error.add_note(line)
        raise error


@contextlib.contextmanager
def _token(question: Question) -> Iterator[None]:
    """Write the file by which machines recognise the run's directory; remove it in the end."""
    directory, name = Path(question["directory"]), question["token"]
    with Folder(directory).replacing(name) as path:
        path.write_text(name, encoding="utf-8")
    try:
        yield
    finally:
        Folder(directory).remove(path.name for path in directory.glob(f"{name}*"))


def _answers(
    machines: Sequence[Machine], question: Question, patience: float
) -> Mapping[str, Answer | str]:
    """Return each machine's answer by its address, or in words why there is none."""
    import ray

    task = ray.remote(num_cpus=0, max_retries=0)(inspection.inspect)
    asked = {
        machine.address: task.options(scheduling_strategy=pinned(machine)).remote(question)
        for machine in machines
    }
    refs = list(asked.values())
    answered, _ = ray.wait(refs, num_returns=len(refs), timeout=patience)
    return {
        address: _answer(ref) if ref in answered else f"has not answered within {patience:g} s"
        for address, ref in asked.items()
    }


def _answer(ref: Any) -> Answer | str:
    import ray

    try:
        answer: Answer = ray.get(ref)
    except Exception as error:  # of Ray, or of whatever is installed there
        return f"cannot be asked: {words_of(error)}"
    return answer


def pinned(machine: Machine) -> Any:
    """Return Ray's scheduling strategy for tasks on this machine alone."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(machine.node, soft=False)
