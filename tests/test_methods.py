"""A method's declaration, strategy, client, test, and page must agree.

The module also tests the packages: their contents and their imports.
"""

import ast
import functools
import importlib
import re
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from federation import small

from fedhet.config.sources import defaults, to_flower
from fedhet.methods.registry import find_method, method_names
from fedhet.runs.log import RunLog
from fedhet.settings.run import RunSettings
from fedhet.settings.schema import flatten
from fedhet.wire.contract import ScalarField, TensorField, WeightsField

ROOT = Path(__file__).parent.parent
HALVES = ("fedhet.strategies", "fedhet.clients")
DECLARATION = "fedhet.methods."
MODULES_OF = {name: name.replace("-", "_") for name in method_names()}


@pytest.mark.parametrize("name", method_names())
def test_method_has_strategy_and_client(name):
    method = find_method(name)
    module = MODULES_OF[name]
    declaration = importlib.import_module(DECLARATION + module)
    assert declaration.SPEC is method.spec
    assert (method.strategy.__module__, method.client.__module__) == method.modules
    for half, found in zip(HALVES, method.modules, strict=True):
        own = (ROOT / half.replace(".", "/") / f"{module}.py").exists()
        assert found == f"{half}.{module if own else declaration.EXTENDS}"
    if method.modules[0].endswith(module):
        assert method.strategy.spec is method.spec
    assert method.spec.headline in {"personal", "common"}


@pytest.mark.parametrize("name", method_names())
def test_message_fields_are_described(name):
    method = find_method(name)
    for contract in (method.spec.instructions, method.spec.replies):
        names = [field.name for field in contract.fields]
        assert len(set(names)) == len(names)
        for field in contract.fields:
            assert isinstance(field, TensorField | WeightsField | ScalarField)
            assert field.help


def used_modules() -> set[str]:
    """Return the modules of the strategies and of the clients."""
    return {module for name in method_names() for module in find_method(name).modules}


def test_method_uses_sides_of_the_extended_method(tmp_path):
    """The declaration is the method's own, so its messages are, too."""
    config = small("fedbn", models=["resnet10"])
    assert config.method.modules == ("fedhet.strategies.fedavg", "fedhet.clients.fedavg")
    server = config.method.strategy(config, RunLog(config, tmp_path, workers=1))
    assert server.spec is config.method.spec
    assert server.spec is not find_method("fedavg").spec
    assert server.settings.part == "all-but-norms"


@pytest.mark.parametrize(
    ("room", "others"),
    [("fedhet.methods", {"registry.py", "spec.py"}), *((half, {"base.py"}) for half in HALVES)],
)
def test_method_packages_contain_only_methods(room, others):
    inside = {
        path.name
        for path in (ROOT / room.replace(".", "/")).iterdir()
        if path.name != "__pycache__"
    }
    methods = {f"{m}.py" for m in MODULES_OF.values()}
    if room in HALVES:  # Some methods use the strategy or the client of another method.
        methods &= {f"{m.rpartition('.')[2]}.py" for m in used_modules() if m.startswith(room)}
    assert inside == {"__init__.py", *others, *methods}


# --- settings ---------------------------------------------------------------------------------


def test_tables_of_settings_have_unique_names():
    tables = [name.partition(".")[0] for name in RunSettings.fields()]
    methods = [find_method(name).table for name in method_names()]
    assert len(set(methods)) == len(methods)
    assert not set(methods) & set(tables)


def test_pyproject_lists_every_setting_for_flower():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    followed = {"clients": 0}  # the number of simulated nodes, not the default of `fedhet run`
    assert flatten(listed) == to_flower(defaults()) | followed, "run: make reference"


# --- the rooms --------------------------------------------------------------------------------


def _name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {
    _name_of(path): path
    for package in ("fedhet",)
    for path in sorted((ROOT / package).rglob("*.py"))
}


@functools.cache
def tree_of(module: str) -> ast.Module:
    """Return the syntax tree of a module."""
    return ast.parse(PATHS[module].read_text())


def _for_types_alone(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def on_import(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that run when a module is imported."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            handlers = getattr(node, "handlers", [])
            parts = [getattr(node, part, []) for part in ("orelse", "finalbody")]
            yield from on_import([] if _for_types_alone(node) else node.body)
            for part in [*parts, *(handler.body for handler in handlers)]:
                yield from on_import(part)


def at_any_time(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports of a module, including imports within functions, excluding type imports."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif _for_types_alone(node):
            yield from at_any_time(node.orelse)  # type: ignore[attr-defined]
        else:
            yield from at_any_time(list(ast.iter_child_nodes(node)))  # type: ignore[arg-type]


def targets(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Yield the modules of this project that an import names."""
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute here"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        found = [name if name in PATHS else str(node.module) for name in names]
    else:
        found = [alias.name for alias in node.names]
    yield from (name for name in found if name.partition(".")[0] == "fedhet")


def test_imports_are_acyclic():
    def loaded(module):
        """Return the modules that an import loads: the module and its packages."""
        for node in on_import(tree_of(module).body):
            for target in targets(node):
                yield target
                parts = target.split(".")
                for end in range(1, len(parts)):
                    package = ".".join(parts[:end])
                    if not f"{module}.".startswith(f"{package}."):
                        yield package

    graph = {module: set(loaded(module)) - {module} for module in PATHS}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("a circle of imports: " + " <- ".join(error.args[1]))


def test_only_the_registry_imports_methods():
    """The same applies to base classes: strategies and clients are imported with importlib."""
    wrong = {
        f"{module} imports {target}"
        for module in PATHS
        if not module.startswith(HALVES)
        for node in at_any_time(tree_of(module).body)
        for target in targets(node)
        if target.startswith(HALVES)
    }
    assert not wrong, sorted(wrong)
    names = re.compile(r"""["']fedhet\.(strategies|clients)["'.]""")
    others = (module for module in PATHS if not module.startswith(HALVES))
    by_name = {module for module in others if names.search(PATHS[module].read_text())}
    assert by_name == {"fedhet.methods.registry"}


def test_methods_do_not_import_each_other_but_to_extend():
    for room in ("fedhet.methods", *HALVES):
        methods = {f"{room}.{module}" for module in MODULES_OF.values()} & {*PATHS}
        for module in methods:
            bases = {
                ast.unparse(base).partition(".")[0]
                for found in ast.walk(tree_of(module))
                if isinstance(found, ast.ClassDef)
                for base in found.bases
            }
            for node in on_import(tree_of(module).body):
                if set(targets(node)) & methods:
                    names = {alias.name for alias in node.names}
                    assert names & bases, f"{module} imports {names} and extends nothing of it"


def test_sides_import_only_their_own_declaration():
    for path in used_modules():
        imported = (targets(node) for node in on_import(tree_of(path).body))
        declared = {name for names in imported for name in names if name.startswith(DECLARATION)}
        own = DECLARATION + path.rpartition(".")[2]
        assert declared <= {own}, f"{path} imports {declared}"


def test_algorithms_import_no_io():
    allowed = {"base", "learning", "kinds", "algorithms", "settings"}
    pure = {m for m in PATHS if m.startswith("fedhet.algorithms")}
    assert len(pure) > 10
    for module in pure | {"fedhet.learning.training", "fedhet.base.seeding", "fedhet.base.arrays"}:
        for node in at_any_time(tree_of(module).body):
            ours = list(targets(node))
            assert {name.split(".")[1] for name in ours} <= allowed, f"{module}: {ours}"
            outside = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            assert outside.partition(".")[0] not in {"flwr", "pathlib", "os", "io", "safetensors"}
