"""Weights after training with HtFLlib or PFLlib, and with fedhet, from equal initial weights.

    python -m benchmarks.conformance --htfllib DIR --pfllib DIR [--methods fedavg,fedgh]
        [--out runs/conformance] [--seconds] [--write]

DIR is a checkout of github.com/TsingZ0/HtFLlib or github.com/TsingZ0/PFLlib. Each library executes
main.py in a separate process, and reads the same files as fedhet (`pfllib:DIR`). To compare
weights, all programs compute in float64, initial weights depend only on their shape, and an epoch
is one batch with all samples of a client, so that no random number differs. If the algorithm of a
library differs from the paper, a second run changes it, as stated by the case's changes. With
--seconds, the durations of rounds are compared, with float32 and small batches. --write stores the
results in benchmarks/measured/conformance.json, from which `make reference` writes
docs/conformance.md.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import runpy
import subprocess
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedhet.base.arrays import Array
from fedhet.base.disk import write_text
from fedhet.runs.units import ABSENT
from fedhet.settings.schema import as_text

HTFLLIB, PFLLIB = "HtFLlib", "PFLlib"
FINISHED = "finished"
"""Name of the file that marks a finished run."""
CLIENTS, CLASSES, SAMPLES, TEST_SAMPLES = 3, 10, 32, 16
EPOCHS, LEARNING_RATE = 2, 0.01


@dataclass(frozen=True)
class Scale:
    """Size of a comparison."""

    dataset: str
    """Name of the data. PFLlib selects the model for images [3, 32, 32] by "Cifar10"."""
    samples: int
    batch: int
    rounds: int
    epochs: int


EXACT = Scale("Cifar10-digits", SAMPLES, SAMPLES, rounds=3, epochs=EPOCHS)
TIMED = Scale("Cifar10-timed", 300, 10, rounds=4, epochs=1)
REPEATS = 2
"""Number of timed runs. Durations are compared without the first round."""
UNUSED = (
    *("h5py", "calmsize", "cvxpy", "higher", "flcore.servers.serverktl_stylegan_xl"),
    *("flcore.servers.serverktl_stylegan_3", "flcore.servers.serverktl_stable_diffusion"),
)
"""Modules that the libraries import for other methods, and for writing results."""
RUNS = ("unchanged", "changed")
RECORDS = Path(__file__).parent / "measured" / "conformance.json"


@dataclass(frozen=True)
class Change:
    """A change of a library's algorithm, and the reason for it."""

    reason: str
    """Sentence that states the difference from the paper or its code."""
    apply: Callable[[], None]


@dataclass(frozen=True)
class Case:
    """A method, its options in the library, and the same settings here."""

    method: str
    library: str
    algorithm: str
    options: Mapping[str, object] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    changes: Sequence[Change] = ()
    remark: str = ""
    """Sentence on the difference, if it cannot be removed by small changes."""


def imported(name: str) -> Any:
    """Import a module of the library. Its directory `system` is on the path."""
    return importlib.import_module(name)


def mean_divergence() -> None:
    """Let divergences be means over samples, without a gradient to the teacher."""

    class Divergence(nn.KLDivLoss):
        def __init__(self) -> None:
            super().__init__(reduction="batchmean")

        def forward(self, input: Tensor, target: Tensor) -> Tensor:
            return super().forward(input, target.detach())

    nn.KLDivLoss = Divergence  # type: ignore[misc, assignment]


def unclipped() -> None:
    """Let gradients have any norm."""
    nn.utils.clip_grad_norm_ = lambda *_: None  # type: ignore[assignment]


def prototypes_after_training() -> None:
    """Let clients compute prototypes with the trained model, in evaluation mode."""
    client = imported("flcore.clients.clientproto").clientProto
    collect, train = imported("flcore.clients.clientgh").clientGH.collect_protos, client.train

    def trained(self: Any) -> None:
        train(self)
        collect(self)

    client.train = trained


def prototypes_of_the_trained_model() -> None:
    """Let clients store the trained model before they compute prototypes with it."""
    client = imported("flcore.clients.clienttgp").clientTGP
    collect, train = client.collect_protos, client.train
    client.collect_protos = lambda self: None

    def trained(self: Any) -> None:
        train(self)
        collect(self)

    client.train = trained


def kept_projector() -> None:
    """Let clients store the trained projector."""
    module = imported("flcore.clients.clientmrl")
    load, save = module.load_item, module.save_item
    loaded = {}

    def load_item(role: str, name: str, path: str) -> Any:
        item = load(role, name, path)
        if name == "proj":
            loaded[role] = item
        return item

    def save_item(item: Any, role: str, name: str, path: str) -> None:
        save(item, role, name, path)
        if role in loaded:
            save(loaded[role], role, "proj", path)

    module.load_item, module.save_item = load_item, save_item


def complete_updates() -> None:
    """Let FedKD send all singular values."""
    for name in ("clients.clientkd", "servers.serverkd"):
        module = imported(f"flcore.{name}")
        vars(module)["recover"] = dict
        vars(module)["decomposition"] = lambda items, energy: {
            name: np.asarray(value.detach() if isinstance(value, Tensor) else value)
            for name, value in items
        }


def no_weight_decay() -> None:
    """Let pFedMe's steps contain no weight decay."""
    client = imported("flcore.clients.clientpFedMe")
    client.pFedMeOptimizer = functools.partial(client.pFedMeOptimizer, mu=0.0)


def own_personal_model() -> None:
    """Let pFedMe's clients keep the personal model, before its weights are overwritten."""
    client = imported("flcore.clients.clientpFedMe").clientpFedMe
    update = client.update_parameters

    def keep_and_update(self: Any, model: nn.Module, new: Sequence[Tensor]) -> None:
        if new is self.local_params:
            self.personal_model = [p.detach().clone() for p in model.parameters()]
        update(self, model, new)

    client.update_parameters = keep_and_update


def separate_gradients() -> None:
    """Let each loss of FedKD have a gradient only to the model that it trains."""
    groups: list[list[nn.Parameter]] = []
    backward, sgd = Tensor.backward, torch.optim.SGD

    def optimizer(parameters: Iterator[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        groups.append(list(parameters))
        return sgd(groups[-1], lr=lr)

    def backward_to_own(loss: Tensor, *, retain_graph: bool = False) -> None:
        mentor, mentee, projection = groups[-3:]
        inputs = mentor if retain_graph else mentee + projection
        backward(loss, retain_graph=retain_graph, inputs=inputs)

    torch.optim.SGD = optimizer  # type: ignore[misc, assignment]
    Tensor.backward = backward_to_own  # type: ignore[method-assign, assignment]


def means_of_other_clients() -> None:
    """Let FD average probabilities, and let a client's targets not contain its own mean."""
    module, server = imported("flcore.clients.clientfd"), imported("flcore.servers.serverfd")
    load, current = module.load_item, [""]

    def load_item(role: str, name: str, path: str) -> Any:
        item = load(role, name, path)
        if name != "global_logits":
            current[0] = role
            return item
        if item is None:
            return None
        others: dict[int, list[Tensor]] = defaultdict(list)
        for client, means in item:
            for label, mean in means.items() if client != current[0] else ():
                others[label].append(mean)
        means = {label: torch.stack(each).mean(0) for label, each in others.items()}
        return defaultdict(list, means)

    def mean_probabilities(logits: Mapping[int, Sequence[Tensor]]) -> tuple[str, dict[int, Tensor]]:
        means = {label: torch.stack([*each]).softmax(1).mean(0) for label, each in logits.items()}
        return current[0], means

    copier = types.SimpleNamespace(deepcopy=torch.zeros_like)
    vars(module).update(load_item=load_item, agg_func=mean_probabilities, copy=copier)
    vars(server)["proto_aggregation"] = list


DIVERGENCE = Change(
    "In the library, the divergence is divided by the number of classes, and has a gradient to the "
    "teacher.",
    mean_divergence,
)
UNCLIPPED = Change("The library clips gradients to a norm of 10.", unclipped)
CASES = (
    Case("local", HTFLLIB, "Local"),
    Case("lg-fedavg", HTFLLIB, "LG-FedAvg", settings={"lg-fedavg.feature-dim": 512}),
    Case(
        "fedproto",
        HTFLLIB,
        "FedProto",
        settings={"fedproto.feature-dim": 512, "fedproto.weighting": "clients"},
        changes=(
            Change(
                "The library computes prototypes during training, from the model before each "
                "step. Here, they are class means of the trained model (Eq. 3).",
                prototypes_after_training,
            ),
        ),
    ),
    Case(
        "fedtgp",
        HTFLLIB,
        "FedTGP",
        {"server_epochs": 20},
        {
            "fedtgp.feature-dim": 512,
            "fedtgp.distance": "mse",
            "fedtgp.lambda": 1,
            "fedtgp.margin": "nearest",
            "fedtgp.server-epochs": 20,
            "fedtgp.server-lr": LEARNING_RATE,
            "fedtgp.server-batch-size": SAMPLES,
        },
        (
            Change(
                "The library computes prototypes with the model before the round's training, "
                "because it stores the trained model afterwards.",
                prototypes_of_the_trained_model,
            ),
        ),
    ),
    Case(
        "fedgh",
        HTFLLIB,
        "FedGH",
        {"server_epochs": 10, "server_learning_rate": 0.1},
        {
            "fedgh.feature-dim": 512,
            "fedgh.server-epochs": 10,
            "fedgh.server-lr": 0.1,
            "fedgh.server-batch-size": SAMPLES,
        },
    ),
    Case(
        "fd",
        HTFLLIB,
        "FD",
        {"lamda": 1},
        {"fd.gamma": 1},
        (
            Change(
                "In the library, the targets are mean logits of all clients, without a softmax, "
                "and a sample's own logits if its class has no mean. Here, they are the mean "
                "probabilities of the other clients (Algorithm 1, line 5).",
                means_of_other_clients,
            ),
        ),
    ),
    Case(
        "fml",
        HTFLLIB,
        "FML",
        {"alpha": 0.5, "beta": 0.5},
        {"fml.meme": "fedavg-cnn", "fml.alpha": 0.5, "fml.beta": 0.5},
        (DIVERGENCE, UNCLIPPED),
    ),
    Case(
        "fedkd",
        HTFLLIB,
        "FedKD",
        {"mentee_learning_rate": LEARNING_RATE},
        {
            "fedkd.mentee": "fedavg-cnn",
            "fedkd.intensity": "batch",
            "fedkd.intensity-learned": True,
            "fedkd.energy-start": 1,
            "fedkd.energy-end": 1,
        },
        (
            DIVERGENCE,
            UNCLIPPED,
            Change("There, each loss trains both models.", separate_gradients),
            Change(
                "There, clients send factors of the weights, and not of the update.",
                complete_updates,
            ),
        ),
    ),
    Case(
        "fedmrl",
        HTFLLIB,
        "FedMRL",
        {"sub_feature_dim": 128},
        {"fedmrl.shared": "fedavg-cnn", "fedmrl.shared-dim": 128},
        (Change("The library does not store the trained projector.", kept_projector),),
    ),
    Case("fedavg", PFLLIB, "FedAvg"),
    Case("fedprox", PFLLIB, "FedProx", {"mu": 0.1}, {"fedprox.mu": 0.1}),
    Case("fedper", PFLLIB, "FedPer"),
    Case("fedrep", PFLLIB, "FedRep", {"plocal_epochs": 1}, {"fedrep.head-epochs": 1}),
    Case("scaffold", PFLLIB, "SCAFFOLD", {"server_learning_rate": 1}),
    Case(
        "moon",
        PFLLIB,
        "MOON",
        {"mu": 1, "tau": 0.5},
        {"moon.mu": 1, "moon.temperature": 0.5, "moon.projection-dim": 0},
    ),
    Case(
        "ditto",
        PFLLIB,
        "Ditto",
        {"mu": 0.5, "plocal_epochs": EPOCHS},
        {"ditto.lambda": 0.5},
    ),
    Case(
        "pfedme",
        PFLLIB,
        "pFedMe",
        {"lamda": 15, "K": 5, "p_learning_rate": 0.01, "beta": 1},
        {"pfedme.strength": 15, "pfedme.steps": 5, "pfedme.rate": LEARNING_RATE},
        (
            Change(
                "In the library, the local copy overwrites the personal model after training, so "
                "that the library evaluates the averaged model.",
                own_personal_model,
            ),
            Change("Each step has a weight decay of 0.001.", no_weight_decay),
        ),
    ),
)


def main() -> None:
    """Execute the missing runs, print the results, and store them with --write."""
    if sys.argv[1:2] == ["run"]:
        method, directory, run = sys.argv[2:]
        case = next(case for case in CASES if case.method == method)
        scale = TIMED if run.startswith("timed") else EXACT
        if scale is EXACT:
            make_deterministic()
        if "here" in run:
            run_here(case, Path(directory), scale, run)
        else:
            run_library(case, Path(directory), scale, changed=run == "changed")
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--htfllib", type=Path, required=True)
    parser.add_argument("--pfllib", type=Path, required=True)
    parser.add_argument("--methods", default=",".join(case.method for case in CASES))
    parser.add_argument("--out", type=Path, default=Path("runs/conformance"))
    parser.add_argument("--seconds", action="store_true", help="compare durations, not weights")
    parser.add_argument("--write", action="store_true", help="store the results")
    given = parser.parse_args()
    out = given.out.resolve()
    for scale in (EXACT, TIMED):
        write_data(out / "dataset" / scale.dataset, scale.samples)
    roots = {HTFLLIB: given.htfllib.resolve(), PFLLIB: given.pfllib.resolve()}
    records = read_records()
    for case in CASES:
        if case.method in given.methods.split(","):
            measure = compare_seconds if given.seconds else compare
            record = measure(case, roots[case.library], out)
            records[case.method] = records.get(case.method, {}) | record
            print(case.method, record, flush=True)
    if given.write:
        ordered = {case.method: records[case.method] for case in CASES if case.method in records}
        write_text(RECORDS, json.dumps(ordered, indent=1) + "\n")
    print(shown(records))


def write_data(directory: Path, samples: int) -> None:
    """Write enlarged images of digits, five classes for each client, as both libraries do."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 1, 8, 8).repeat(4, 2).repeat(4, 3).repeat(3, 1) / 8 - 1
    rng = np.random.default_rng(0)
    # Equal pixels would be ties in max pooling, whose gradient depends on the order in memory.
    images = images + rng.normal(0, 0.1, images.shape)
    for client in range(CLIENTS):
        classes = (3 * client + np.arange(5)) % CLASSES
        rows = rng.permutation(np.flatnonzero(np.isin(labels, classes)))
        parts = {"train": rows[:samples], "test": rows[samples:][:TEST_SAMPLES]}
        for part, own in parts.items():
            (directory / part).mkdir(parents=True, exist_ok=True)
            data: Any = {"x": images[own].astype(np.float32), "y": labels[own]}
            np.savez_compressed(directory / part / f"{client}.npz", data=data)


def compare(case: Case, root: Path, out: Path) -> dict[str, Any]:
    """Compare the weights here with the weights in the unchanged and in the changed library."""
    folder = out / case.method
    execute(case, folder, "here", folder)
    ours = weights_here(folder)
    system = root / "system"
    commit = subprocess.check_output(["git", "-C", root, "rev-parse", "--short=8", "HEAD"])
    record = {"library": case.library, "commit": commit.decode().strip(), "tensors": len(ours)}
    for run in RUNS[: 1 + bool(case.changes)]:
        execute(case, folder, run, system)
        with np.load(folder / run / "weights.npz") as file:
            theirs = dict(file)
        assert {f"after/{name}" for name in ours} <= theirs.keys(), set(theirs) - set(ours)
        gap = max(np.abs(value - theirs[f"after/{name}"]).max() for name, value in ours.items())
        moved = max(np.abs(value - theirs[f"before/{name}"]).max() for name, value in ours.items())
        record[run] = float(gap / moved)
    return record


def compare_seconds(case: Case, root: Path, out: Path) -> dict[str, Any]:
    """Return the median durations of a round here, of its training, and of a round in the library.

    There is one row for each repeat. Durations are in seconds.
    """
    folder = out / case.method
    medians = []
    for repeat in range(REPEATS):  # Alternately, because the machine's speed changes.
        here, there = f"timed here {repeat}", f"timed library {repeat}"
        execute(case, folder, here, folder)
        execute(case, folder, there, root / "system")
        lines = (folder / here / "run" / "metrics.jsonl").read_text().splitlines()
        spent = [json.loads(line)["seconds"] for line in lines]
        ours = [seconds["total"] - seconds["evaluate"] for seconds in spent]
        training = [seconds["train"] for seconds in spent]
        theirs = json.loads((folder / there / "seconds.json").read_text())
        parts = (ours, training, theirs)
        medians.append([round(float(np.median(part[1:])), 3) for part in parts])
    return {"seconds": medians}


def execute(case: Case, folder: Path, run: str, directory: Path) -> None:
    """Execute a run in a separate process, unless it has finished."""
    place = folder / run
    if (place / FINISHED).exists():
        return
    place.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.conformance", "run", case.method]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    with open(place / "log.txt", "w") as log:
        subprocess.run(
            [*command, str(directory), run],
            cwd=place, check=True, env=environment, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    (place / FINISHED).touch()


def read_records() -> dict[str, dict[str, Any]]:
    """Return the stored results, by method."""
    return json.loads(RECORDS.read_text()) if RECORDS.exists() else {}


def shown(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the results as a table in Markdown, and the changes as a list."""
    columns = ["method", "library", *RUNS]
    is_timed = all("seconds" in record for record in records.values())
    columns += ["duration of a round", "of its training"] if is_timed else []
    lines = [f"| {' | '.join(columns)} |", f"|---|---|{'---:|' * (len(columns) - 2)}"]
    changes = []
    for case in CASES:
        if record := records.get(case.method):
            link = f"[`{case.method}`](methods/{case.method}.md)"
            numbers = [f"{record[run]:.0e}" if run in record else ABSENT for run in RUNS]
            if is_timed:
                seconds = np.array(record["seconds"])
                numbers += [
                    f"{ratios.mean():.2f} ({min(ratios):.2f}, {max(ratios):.2f})"
                    for ratios in (seconds[:, :2] / seconds[:, 2:]).T
                ]
            lines.append(f"| {link} | {case.library} {record['commit']} | {' | '.join(numbers)} |")
            reasons = [*(change.reason for change in case.changes), case.remark]
            if text := " ".join(filter(None, reasons)):
                changes.append(f"- **{case.method}**: {text}")
    return "\n".join([*lines, "", *changes, ""])


def make_deterministic() -> None:
    """Compute in float64, and let initial weights depend only on their shape."""

    def fill(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        shape = tuple(tensor.shape)
        values = np.random.default_rng(shape).uniform(-1, 1, shape)
        values /= np.sqrt(np.prod(shape[1:])) if len(shape) > 1 else 10
        with torch.no_grad():
            return tensor.copy_(torch.from_numpy(values))

    torch.set_default_dtype(torch.float64)
    torch.float32, Tensor.float = torch.float64, Tensor.double  # type: ignore[misc, method-assign]
    for name in ("kaiming_uniform_", "kaiming_normal_", "uniform_", "normal_", "xavier_uniform_"):
        setattr(nn.init, name, fill)


def double_messages() -> None:
    """Let fedhet send float64 instead of float32, so that messages are not rounded."""
    from fedhet.wire.contract import TensorField

    np.float32 = np.float64  # type: ignore[misc, assignment]
    check = TensorField.__post_init__

    def widen(field: TensorField) -> None:
        if field.dtype == "float32":
            object.__setattr__(field, "dtype", "float64")
        check(field)

    TensorField.__post_init__ = widen  # type: ignore[method-assign, assignment]


def weights_here(folder: Path) -> dict[str, Array]:
    """Return the weights of all clients' models after a run of fedhet, by client and name."""
    from safetensors.numpy import load_file

    weights = {}
    for path in folder.glob(f"here/run/state/*/client-*/round-{EXACT.rounds:06}.safetensors"):
        client = path.parent.name.removeprefix("client-")
        for name, value in load_file(path).items():
            if name.startswith("private/") and not name.endswith("num_batches_tracked"):
                weights[f"{client}/{name}"] = value
    return weights


def run_here(case: Case, folder: Path, scale: Scale, run: str) -> None:
    """Execute a run of fedhet in this process."""
    if scale is EXACT:
        double_messages()
    from fedhet.cli import app
    from fedhet.learning.devices import Compute

    if scale is EXACT:
        to_inputs = Compute.to_inputs
        Compute.to_inputs = lambda self, x: to_inputs(self, x).double()  # type: ignore[method-assign]
    settings: dict[str, object] = {
        "training.optimizer": "sgd", "training.momentum": 0, "training.lr": LEARNING_RATE,
        "training.batch-size": scale.batch, "training.local-epochs": scale.epochs,
        "engine.backend": "inline", "evaluate-from": 1 if scale is EXACT else scale.rounds,
        **case.settings,
    }  # fmt: skip
    options = [f"--set={name}={as_text(value)}" for name, value in settings.items()]
    pool = "--preset=htfe-img-2" if case.library == HTFLLIB else "--models=fedavg-cnn"
    data = f"--dataset=pfllib:{folder.parent / 'dataset' / scale.dataset}"
    numbers = [f"--clients={CLIENTS}", f"--rounds={scale.rounds}", f"--out={folder / run / 'run'}"]
    app(["run", case.method, data, *numbers, pool, *options], standalone_mode=False)


def run_library(case: Case, system: Path, scale: Scale, *, changed: bool) -> None:
    """Execute a run of a library in this process, and write its clients' weights."""
    sys.path.insert(0, str(system))
    for name in UNUSED:
        sys.modules[name] = types.ModuleType(name)
        for attribute in ("size", "FedKTL"):
            setattr(sys.modules[name], attribute, lambda *_: 0)
    torch.load = functools.partial(torch.load, weights_only=False)
    vars(imported("utils.result_utils"))["average_data"] = lambda **_: None
    servers: list[Any] = []
    weights: dict[str, Array] = {}
    server = imported("flcore.servers.serverbase").Server
    initialize = server.__init__

    def collect(when: str) -> None:
        for client in servers[0].clients:
            for name, value in weights_of(case, client):
                weights[f"{when}/{client.id}/{name}"] = value.numpy().copy()

    def initialize_and_keep(self: Any, *args: Any) -> None:
        def train() -> None:
            collect("before")
            type(self).train(self)

        initialize(self, *args)
        vars(self).update(train=train, save_results=lambda: None)
        servers.append(self)

    server.__init__ = initialize_and_keep
    for change in case.changes if changed else ():
        change.apply()
    options = {
        "device": "cpu", "dataset": scale.dataset, "num_classes": CLASSES,
        "batch_size": scale.batch, "local_learning_rate": LEARNING_RATE,
        "global_rounds": scale.rounds - 1, "local_epochs": scale.epochs,
        "eval_gap": 1 if scale is EXACT else scale.rounds,
        "num_clients": CLIENTS, "algorithm": case.algorithm, **case.options,
    }  # fmt: skip
    options |= {"model_family": "HtFE-img-2"} if case.library == HTFLLIB else {"model": "CNN"}
    sys.argv = ["main.py", *(f"--{name}={value}" for name, value in options.items())]
    link = Path("../dataset")  # The library reads this directory.
    if not link.exists():
        link.symlink_to("../dataset")
    runpy.run_path(str(system / "main.py"), run_name="__main__")
    collect("after")
    Path("seconds.json").write_text(json.dumps(servers[0].Budget))
    np.savez("weights.npz", **weights)  # type: ignore[arg-type]


RENAMED = {
    "conv1.0.": "extractor.0.", "conv2.0.": "extractor.3.", "fc1.0.": "extractor.7.",
    "head.": "classifier.", "fc.": "classifier.",
}  # fmt: skip
"""Names of layers in fedhet, by their names in the libraries. Other layers have equal names."""


def weights_of(case: Case, client: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a client's model, with their names in fedhet."""
    parts: dict[str, nn.Module] = {}
    if case.library == PFLLIB:
        parts["extractor."] = client.model_per if case.method == "ditto" else client.model
        if case.method == "pfedme":  # As before an evaluation.
            personal = getattr(client, "personal_model", client.personalized_params)
            for own, value in zip(client.model.parameters(), personal, strict=True):
                own.data = value.data.clone()
    else:
        load = imported("flcore.clients.clientbase").load_item
        place = client.save_folder_name
        parts["extractor."] = load(client.role, "model", place)
        if case.method == "fedmrl":
            shared = load(client.role, "global_model", place)
            parts["extractor.own."] = parts.pop("extractor.")
            parts["extractor.shared.extractor.native."] = shared or load(
                "Server", "global_model", place
            )
            parts["extractor.projector."] = load(client.role, "proj", place)
        if case.method == "fedkd":
            parts["bridge."] = load(client.role, "W_h", place)
    for extractor, module in parts.items():
        for name, value in module.state_dict().items():
            if isinstance(module, nn.Linear):
                yield f"private/{extractor}{name}", value
                continue
            short = name.removeprefix("base.")
            old = next((old for old in RENAMED if short.startswith(old)), "")
            renamed = RENAMED.get(old, "extractor.") + short.removeprefix(old)
            outer = "extractor.shared." if "shared" in extractor else ""
            if renamed.startswith("extractor."):
                yield f"private/{extractor}{renamed.removeprefix('extractor.')}", value
            else:
                yield f"private/{outer}{renamed}", value


if __name__ == "__main__":
    main()
