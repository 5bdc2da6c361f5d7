"""Commands that only read declarations import no heavy library.

Time depends on the machine, but imports do not. `benchmarks/start.py` measures the time.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from federation import small

from fedhet.base.errors import SettingsError
from fedhet.config.resolve import resolve
from fedhet.config.sources import validate
from fedhet.data.spec import DataSpec
from fedhet.data.store import RunData, load
from fedhet.engines import simulate as simulation
from fedhet.engines.simulate import choose_backend
from fedhet.methods.registry import shipped_names

ROOT = Path(__file__).parent.parent
HEAVY = {"torch", "torchvision", "matplotlib", "flwr", "pandas", "sklearn", "ray", "tensorboard"}
AFTERWARDS = """
import atexit, sys
atexit.register(lambda: print("IMPORTED", *sorted({m.partition(".")[0] for m in sys.modules})))
from fedhet.cli import main
main()
"""
SEVERAL = """
import contextlib, io, json, sys
from fedhet import cli
cli.exit_at_once = sys.exit
for words in json.loads(sys.argv.pop()):
    status, said = 0, io.StringIO()
    sys.argv = ["fedhet", *words]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            cli.main()
        except SystemExit as end:
            status = end.code or 0
    print(json.dumps([status, said.getvalue(), [m.partition(".")[0] for m in sys.modules]]))
"""


def python(*words, **environment):
    """Run Python in a new process."""
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def imported_by(*words, **environment):
    """Run a command in a new process; return its status, output and top-level modules."""
    done = python("-P", "-c", AFTERWARDS, *words, **environment)
    said, _, modules = done.stdout.rpartition("IMPORTED ")
    assert modules, done.stderr
    return done.returncode, said + done.stderr, set(modules.split())


def assert_light(cases, **environment):
    """Run commands one after another in one new process, which imports no heavy library."""
    commands = json.dumps([words.split() for words in cases])
    done = python("-P", "-c", SEVERAL, commands, **environment)
    assert done.returncode == 0, done.stderr
    for (words, (status, says)), line in zip(cases.items(), done.stdout.splitlines(), strict=True):
        found, said, modules = json.loads(line)
        assert found == status, (words, said)
        assert says in said, (words, said)
        assert "fedhet" in modules
        assert not HEAVY & {*modules}, words


def test_commands_without_training_import_no_heavy_library():
    cases = {
        "--help": (0, "deploy-local"),
        "--version": (0, "0."),
        "run --help": (0, "--resume"),
        "methods": (0, "class-wise features and logits"),
        "methods felo": (0, "felo.share-weights"),
        "presets": (0, "felo-cifar10"),
        "settings": (0, "engine.round-timeout"),
        "table": (0, "architectures and by partition"),
        "run felo --set lrr=1": (2, "did you mean 'training.lr'?"),
        "run felo --set lr=-1": (2, "'training.lr': expected number > 0"),
        "run felo --set felo.alpha=-1": (2, "'felo.alpha': expected number >= 0"),
        "run fello": (2, "did you mean 'felo'?"),
        "sweep felo felo.alpha=1,-1": (2, "'felo.alpha': expected number >= 0"),
        "deploy-local felo --set lr=-1": (2, "'training.lr': expected number > 0"),
    }
    assert_light(cases, TERMINAL_WIDTH="wide")  # Typer reads it as an integer when it shows help


def test_schema_of_a_table_needs_no_pytorch(tmp_path):
    table, schema = tmp_path / "table.csv", tmp_path / "schema.toml"
    table.write_text("age,color,ill\n1,red,no\n2,blue,yes\n3,red,no\n")
    status, said, modules = imported_by(
        "schema", str(table), "--target", "ill", "--out", str(schema)
    )
    assert status == 0, said
    assert "classes: no, yes" in said
    assert not modules & (HEAVY - {"pandas"})


TRAINING = """
import sys
from pathlib import Path
from fedhet.config.resolve import resolve
from fedhet.engines.simulate import train
values = {"clients": 2, "rounds": 1, "data.max-samples": 60, "training.local-epochs": 1}
values |= {"method": sys.argv[2], "models.pool": ["mlp", "cnn2"]}
train(resolve(values), Path(sys.argv[1]))
print("IMPORTED", *sys.modules)
"""


def test_small_run_imports_no_ray_compiler_or_plots(tmp_path):
    """Unlike the commands above, it imports PyTorch; otherwise, the list would prove nothing.

    The networks are not from torchvision, which imports PyTorch's compiler. The server of FedTGP
    trains as well as its clients.
    """
    done = python("-c", TRAINING, str(tmp_path / "run"), "fedtgp")
    assert done.returncode == 0, done.stderr
    modules = set(done.stdout.rpartition("IMPORTED ")[2].split())
    assert {"torch", "flwr"} <= modules
    assert (tmp_path / "run" / "summary.json").exists()
    unneeded = "torch._dynamo torch._inductor torchvision ray datasets flwr_datasets pandas"
    assert not modules & {*unneeded.split(), "matplotlib", "seaborn"}


COMPILED = """
import sys
import torch
from pathlib import Path
from fedhet.config.resolve import resolve
from fedhet.engines.simulate import train
values = {"method": "fedavg", "data.max-samples": 60, "training.local-epochs": 1}
values |= {"models.pool": "mlp", "clients": 2, "rounds": 1, "engine.backend": "inline"}
train(resolve(values), Path(sys.argv[1]))
operations = []
def record(graph, inputs):
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    operations.append([node.target.__name__ for node in nodes])
    return graph.forward
@torch.compiler.disable
def excluded(x):
    return x + 1
compiled = torch.compile(lambda x: excluded(x) * 2, backend=record)
assert compiled(torch.ones(1)).item() == 4
print("OPERATIONS", operations)
"""


def test_training_does_not_change_what_pytorch_compiles_for_the_user(tmp_path):
    done = python("-c", COMPILED, str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.rpartition("OPERATIONS ")[2].strip() == "[['mul']]", "not of `excluded`"
    assert (tmp_path / "run" / "summary.json").exists()


FIRST = """
import sys
sys.modules["fedhet.cli.training"] = None  # its import fails
from fedhet.cli import main
try:
    main()
except SystemExit:
    print("IMPORTED", *{name.partition(".")[0] for name in sys.modules})
"""


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["run", "felo", "--clients", "4"],
            "preparing felo on digits: 4 clients, 10 rounds, backend auto",
        ),
        (
            ["sweep", "felo", "felo.alpha=0.1,1", "--rounds", "1", "--backend", "inline"],
            "preparing felo on digits: 10 clients, 1 round, 2 runs, backend inline",
        ),
    ],
    ids=["run", "sweep"],
)
def test_first_line_comes_before_the_heavy_imports(words, line):
    done = python("-c", FIRST, *words)
    first, imported = done.stdout.splitlines()
    assert first == line
    assert not set(imported.split()) & HEAVY


ENDING = """
import atexit, sys
from concurrent.futures import ThreadPoolExecutor
from fedhet.cli import command
pool = ThreadPoolExecutor(1)  # the end waits for its thread
pool.submit(lambda: print("thread"))
atexit.register(lambda: print("atexit"))
sys.argv = ["fedhet", *sys.argv[1:]]
command()
"""


@pytest.mark.parametrize(("word", "status"), [("--version", 0), ("nosuch", 2)])
def test_program_ends_with_its_status_and_exit_handlers(word, status):
    done = python("-c", ENDING, word)
    assert done.returncode == status
    assert {"thread", "atexit"} <= set(done.stdout.split())


def test_list_of_tables_is_counted_from_the_tables():
    from tools.results import tables_listed

    stored = json.loads((ROOT / "fedhet/experiments/list.json").read_text(encoding="utf-8"))
    assert stored == [list(row) for row in tables_listed()]  # if not: make reference


@pytest.fixture
def two_cpus(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)


def backend_of(directory=Path("none"), **settings):
    values = {name.replace("__", ".").replace("_", "-"): each for name, each in settings.items()}
    config = resolve({"method": "felo", "clients": 4, "models.pool": ["mlp"], **values})
    return choose_backend(config, RunData.for_run(config.run), directory)


def test_small_run_trains_in_this_process(two_cpus):
    backend, reason = backend_of(rounds=1)
    assert backend == "inline"
    assert re.fullmatch(r"training in this process: about \d+ s of work", reason)


@pytest.mark.parametrize("backend", ["inline", "ray"])
def test_given_backend_is_kept(backend):
    assert backend_of(engine__backend=backend) == (backend, "")


def test_ray_is_used_if_it_saves_time(two_cpus, monkeypatch):
    """Ray takes 15 s, and two workers save half of the work, so the bound is 30 s."""
    for seconds, chosen, about in [(29, "inline", "about"), (31, "ray", "more than")]:
        monkeypatch.setattr(simulation, "_seconds_of_work", lambda *_, work=seconds: work)
        place = {"inline": "in this process", "ray": "on Ray"}[chosen]
        assert backend_of() == (chosen, f"training {place}: {about} {seconds} s of work")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    assert backend_of() == ("inline", "training in this process: Ray would have only one worker")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"engine__ray_address": "auto"}, "'engine.ray-address' is set"),
        ({"engine__cpus_per_client": 2.0}, "'engine.cpus-per-client' is set"),
        ({"engine__gpus_per_client": 0.5}, "'engine.gpus-per-client' is set"),
        ({"pace__min_replies": 0.5}, "rounds are timed with this machine's clock"),
        ({"pace__stragglers": 0.5}, "rounds are timed with this machine's clock"),
    ],
)
def test_settings_that_need_ray_select_it(settings, reason):
    assert backend_of(**settings) == ("ray", f"training on Ray: {reason}")


def test_work_is_estimated_from_the_remaining_rounds(two_cpus, monkeypatch, tmp_path):
    instructions = []
    monkeypatch.setattr(
        simulation, "_seconds_per_sample", lambda name, *_: instructions.append(name) or 1e-4
    )
    settings = {"rounds": 10, "training.local-epochs": 2, "models.pool": ["mlp", "cnn2"]}
    config = resolve({"method": "felo", "clients": 4, **settings}).replacing(resume=True)
    data = RunData.for_run(config.run)
    train = sum(len(data.split_rows(client)[0]) for client in range(4))
    own = sum(len(data.split_rows(client)[1]) for client in range(4))
    (tmp_path / "metrics.jsonl").write_text("{}\n" * 3)
    for directory, rounds in [(tmp_path / "new", 10), (tmp_path, 7)]:
        work = simulation._seconds_of_work(config, data, directory, 1e9)
        samples = rounds * (2 * train + (own + 4 * len(data.common_test)) / 3)
        assert work == pytest.approx(1e-4 * samples)
    assert set(instructions) == {"mlp", "cnn2"}


def test_program_waits_for_closing_during_the_report(monkeypatch, tmp_path):
    events, begun = [], threading.Event()

    @contextlib.contextmanager
    def cluster(*_):
        yield None
        begun.set()
        events.append("closed")
        if len(events) > 2:
            raise OSError("full")

    def write(directory):
        assert begun.wait(30)  # it does not wait for the report
        events.append("reported")

    monkeypatch.setattr(simulation, "cluster_for", cluster)
    monkeypatch.setattr("fedhet.report.write_all", write)
    simulation.simulate(small(rounds=1), tmp_path / "a")
    assert sorted(events) == ["closed", "reported"]
    with pytest.raises(OSError, match="full"):
        simulation.simulate(small(rounds=1), tmp_path / "b")


def test_declaration_imports_neither_pytorch_nor_flower():
    """Commands can therefore read the declarations themselves."""
    modules = [f"fedhet.methods.{name.replace('-', '_')}" for name in sorted(shipped_names())]
    lines = [f"import {module}" for module in modules]
    lines += ["import sys", "print(*{name.partition('.')[0] for name in sys.modules})"]
    done = python("-c", "\n".join(lines))
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.split())
    assert "fedhet" in imported
    assert not imported & HEAVY


def test_new_setting_is_known_to_the_commands_at_once(tmp_path):
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "fedhet", tmp_path / "fedhet", ignore=ignored)
    declaration = tmp_path / "fedhet" / "methods" / "felo.py"
    old, new = "    alpha: ", '    novel: Count = Field(3, description="a new one")\n    alpha: '
    assert old in declaration.read_text()
    declaration.write_text(declaration.read_text().replace(old, new))
    _, said, modules = imported_by("methods", "felo", PYTHONPATH=str(tmp_path))
    assert "felo.novel" in said
    assert "a new one" in said
    assert not modules & HEAVY
    status, said, _ = imported_by("run", "felo", "--set", "novel=0", PYTHONPATH=str(tmp_path))
    assert status == 2
    assert "'felo.novel': expected integer >= 1" in said


def test_without_the_experiments_only_their_command_is_missing(tmp_path):
    ignored = shutil.ignore_patterns("__pycache__", "experiments")
    shutil.copytree(ROOT / "fedhet", tmp_path / "fedhet", ignore=ignored)
    cases = {
        "methods": (0, "class-wise features and logits"),
        "run --help": (0, "--resume"),
        "table": (2, "No such command 'table'"),
    }
    assert_light(cases, PYTHONPATH=str(tmp_path))
    status, said, _ = imported_by("--help", PYTHONPATH=str(tmp_path))
    assert (status, "deploy-local" in said) == (0, True)
    assert "table" not in re.findall(r"^\W*([a-z-]+)  ", said, re.MULTILINE)
    values = '{"method": "local", "clients": 2, "rounds": 1, "models.pool": ["mlp"]}'
    lines = f"""
from pathlib import Path
import fedhet
from fedhet.config.resolve import resolve
from fedhet.engines.simulate import simulate
assert Path(fedhet.__file__).is_relative_to("{tmp_path}")
simulate(resolve({values}), Path("{tmp_path}") / "run")
"""
    done = python("-P", "-c", lines, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "report.html").exists()


def test_first_check_sorts_the_values():
    values = {"method": "felo", "rounds": 3, "felo.alpha": 0.5, "training.lr": 0.1}
    found = validate(values)
    assert (found.method.name, found.run.rounds, found.run.training.lr) == ("felo", 3, 0.1)
    assert found.method_settings.flat()["alpha"] == 0.5


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"method": 1}, "'method': expected string, got 1"),
        ({"method": "felo", "felo.alpha": "much"}, "'felo.alpha': expected number .* got 'much'"),
        ({"method": "felo", "felo.weighting": "votes"}, "one of clients, samples"),
        ({"method": "felo", "cofed.iterations": 7}, "unsupported by method 'felo'"),
        ({"method": "felo", "nope": 1}, "unknown setting 'nope'"),
    ],
)
def test_first_check_raises(values, fault):
    with pytest.raises(SettingsError, match=fault):
        validate(values)


def test_digits_equal_scikit_learn():
    from sklearn.datasets import load_digits

    theirs = load_digits()
    dataset = load(DataSpec(dataset="digits"))
    assert dataset.test is not None
    ours = {
        (label, tuple(((image + 1) * 8).flatten().tolist()))
        for split in (dataset.train, dataset.test)
        for image, label in zip(split.x.numpy(), split.y.tolist(), strict=True)
    }
    expected = {
        (int(label), tuple(row)) for row, label in zip(theirs.data, theirs.target, strict=True)
    }
    assert ours == expected
    assert len(dataset.train) + len(dataset.test) == 1797
    assert dataset.format.classes == tuple(map(str, theirs.target_names))
