"""Generator of the reference documentation from the declarations in the code.

`python -m tools.reference`, run in the project's root directory, writes:

- docs/reference.md: the settings that every run has
- docs/methods/NAME.md: the properties and settings of a method, and the paper's experiment
- README.md and docs/methods.md: the list of methods
- docs/runs.md: the models whose scores represent the methods
- docs/api.md: the public names, from the directives in docs/api-details.md
- docs/rounds.md, docs/privacy.md and docs/secure-aggregation.md: the treatment of late replies, of
  privacy, and of secure aggregation, by method
- pyproject.toml: the default run config of `flwr run`

In pages that also contain hand-written text, only the part between `BEGIN` and `END` is generated.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import json
import re
import textwrap
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import tomli_w
from pydantic.fields import FieldInfo

from fedhet.config.describe import (
    defenses,
    literal,
    privacy,
    setting_rows,
    summed,
    tasks,
    training,
)
from fedhet.config.resolve import resolve
from fedhet.config.sources import CLIENTS, FOLLOW, defaults, to_flower
from fedhet.kinds import IMAGE
from fedhet.methods.registry import Method, find_method, shipped_names
from fedhet.methods.spec import Late, MethodSpec
from fedhet.settings.run import RunSettings
from fedhet.settings.schema import nest

HEAD = """# Reference of the settings

All settings of a run, with their defaults. Each [method's page](methods.md) lists the method's
settings, and the [guide](guide.md#settings) explains how to pass settings. `make reference`
generates this page.

`[0, 1)` is the range from 0 up to but excluding 1. Settings marked *per client* accept several
values, which are assigned to the clients in turn.
"""
BEGIN, END = "<!-- make reference -->", "<!-- end -->"
REFERENCE_COLUMNS = ("setting and default", "allowed values", "description")
HEADLINE_COLUMNS = ("method", "common", "personal", "model in the paper")
METHOD_COLUMNS = ("method", "description", "requires")
LATE_COLUMNS, PRIVACY_COLUMNS = ("methods", "late reply"), ("methods", "with privacy")
SUMMED_COLUMNS = ("methods", "with secure aggregation")
LATE: Mapping[Late, str] = {
    "averaged": "averaged, with a weight that depends on its age",
    "kept": "used unchanged, because it is the client's own model, class means, or their mixture",
    "refused": "discarded without a penalty, because its public samples or its submodel are of an "
    "earlier round",
}
API_COLUMNS = ("name", "purpose")
_DIRECTIVE = re.compile(r"^(?:## (.+)|\.\. auto\w+:: (\S+)\n((?:   .*\n)*))", re.MULTILINE)
_DOCUMENTED = (property, cached_property, classmethod, staticmethod)
"""Types of class attributes with docstrings, other than functions."""
PAPER_SETTINGS = Path(__file__).with_name("paper_settings.toml")


def reference(root: Path) -> dict[Path, str]:
    """Return the text of every generated page, by its path in the project."""
    methods = [find_method(name) for name in sorted(shipped_names())]
    docs = root / "docs"
    parts = {
        root / "README.md": _index(methods, "docs/methods/", brief=True),
        docs / "methods.md": _index(methods, "methods/"),
        docs / "runs.md": _headlines(methods),
        docs / "api.md": _api((docs / "api-details.md").read_text(encoding="utf-8")),
        docs / "rounds.md": _grouped(
            LATE_COLUMNS,
            {m.name: words for late, words in LATE.items() for m in methods if m.spec.late == late},
        ),
        docs / "privacy.md": _grouped(
            PRIVACY_COLUMNS,
            {m.name: m.spec.privacy.mechanism or "unsupported" for m in methods},
        ),
        docs / "secure-aggregation.md": _grouped(
            SUMMED_COLUMNS, {m.name: summed(m) for m in methods if not m.spec.sums.unsupported}
        ),
        **{docs / "methods" / f"{method.name}.md": _method(method) for method in methods},
    }
    papers = {docs / "methods" / f"{method.name}.md": method.spec.paper for method in methods}
    return {docs / "reference.md": f"{HEAD}{_settings(RunSettings.fields())}"} | {
        path: with_part(path, part, papers.get(path, "")) for path, part in parts.items()
    }


def with_part(path: Path, part: str, paper: str = "", begin: str = BEGIN) -> str:
    """Return a page's text with a new generated part after the mark `begin`.

    If the page is new, it cites `paper`.
    """
    page = f"# {path.stem}\n\n{BEGIN}{END}\n"
    if path.exists():
        page = path.read_text(encoding="utf-8")
    elif paper:
        page = f"# {path.stem}\n\n{paper}.\n\n{BEGIN}{END}\n\n## Results\n\nNot measured yet.\n"
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n\n{part}\n{END}{rest.partition(END)[2]}"


def _index(methods: Iterable[Method], prefix: str, *, brief: bool = False) -> str:
    """Build the table of methods; `brief` omits their requirements."""
    columns = len(METHOD_COLUMNS) - brief
    rows = [
        (f"[`{method.name}`]({prefix}{method.name}.md)", method.spec.title, _needs(method.spec))
        for method in methods
    ]
    return in_markdown(METHOD_COLUMNS[:columns], [row[:columns] for row in rows])


def _headlines(methods: Iterable[Method]) -> str:
    """Build the table of the models whose scores represent the methods."""
    rows = []
    for method in methods:
        spec, cells = method.spec, []
        for protocol in ("common", "personal"):
            kind = f"`{spec.deployed[protocol]}`"
            cells.append(f"**{kind}**" if protocol == spec.headline else kind)
        name = f"[`{method.name}`](methods/{method.name}.md)"
        rows.append((name, *cells, spec.paper_model))
    return in_markdown(HEADLINE_COLUMNS, rows)


def _api(details: str) -> str:
    """List the objects that the directives in docs/api-details.md document, by section."""
    parts: list[str] = []
    rows: list[tuple[str, str]] = []
    for heading, name, options in _DIRECTIVE.findall(details):
        if heading:
            parts += [in_markdown(API_COLUMNS, rows)] if rows else []
            parts.append(f"## {heading}\n")
            rows = []
            continue
        target = _resolve_name(name)
        listed = [each.strip() for each in options.partition(":members:")[2].split(",")]
        members = [each for each in listed if each]
        is_module = inspect.ismodule(target)
        fields = _field_summaries(target) if inspect.isclass(target) else {}
        if not members and ":members:" in options:
            every = (*fields, *vars(target))
            members = [each for each in dict.fromkeys(every) if not each.startswith("_")]
        short = name.rpartition(".")[2]
        if not is_module:
            rows.append((f"**`{short}`**", _summary(target)))
        for member in members:
            inherited = inspect.getattr_static(target, member, None)
            if member in fields:
                summary = fields[member]
            elif callable(inherited) or isinstance(inherited, _DOCUMENTED):
                summary = _summary(inherited)
            else:
                continue
            rows.append((f"`{member if is_module else f'{short}.{member}'}`", summary))
    return "\n".join([*parts, in_markdown(API_COLUMNS, rows)])


def _resolve_name(name: str) -> Any:
    """Return the module, or the object in a module, with a dotted name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return getattr(importlib.import_module(module), attribute)


def _field_summaries(target: type) -> dict[str, str]:
    """Return the summaries of the strings that follow the fields of a class, by field."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(target))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, following in itertools.pairwise(definition.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match following:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    found[field.target.id] = _summary(text)
    return found


def _summary(target: object) -> str:
    """Return the summary of an object's docstring, or of a string, as the text of a table cell."""
    text = inspect.cleandoc(target) if isinstance(target, str) else inspect.getdoc(target) or ""
    summary = text.partition("\n\n")[0]
    return " ".join(summary.split()).replace("|", "\\|")


def _grouped(columns: tuple[str, str], words: Mapping[str, str]) -> str:
    """Build a table in which methods with the same text share a row."""
    names: dict[str, list[str]] = {}
    for name, line in words.items():
        names.setdefault(line, []).append(f"`{name}`")
    return in_markdown(columns, [(", ".join(each), line) for line, each in names.items()])


def _needs(spec: MethodSpec) -> str:
    """Return the data and models that a method requires, as text."""
    needed = {
        "public data": spec.needs_public,
        "unlabeled client samples": spec.needs_unlabeled,
        "one architecture": spec.one_model,
        "a pool of one model": spec.submodels,
        "a simulation": spec.simulation_only,
    }
    return ", ".join(name for name, holds in needed.items() if holds)


def _method(method: Method) -> str:
    """Build the generated part of a method's page."""
    spec = method.spec
    declaration = f"fedhet.methods.{method.name.replace('-', '_')}"
    modules = zip(("declaration", "server", "client"), (declaration, *method.modules), strict=True)
    code = [f"[{side}](../../{module.replace('.', '/')}.py)" for side, module in modules]
    needed, pool = _needs(spec), spec.pool(IMAGE)
    extra = "; ".join(f"`{name}` ({title})" for name, title in spec.metrics.items())
    lines = [
        f"Requires: {needed}." if needed else "",
        tasks(method) if len(spec.tasks) > 1 else "",
        headline(method),
        training(method),
        f"Default model: `{pool[0]}` for images." if len(pool) == 1 else "",
        _messages(spec),
        defenses(method),
        privacy(method),
        f"Extra metrics: {extra}." if extra else "",
        f"Code: {', '.join(code)}.",
    ]
    parts = ["## Properties\n", *(f"- {line}" for line in lines if line)]
    if method.settings():
        parts += ["\n## Settings\n", _own_settings(method).rstrip()]
    if paper := paper_settings().get(method.name):
        how = f"There is no preset, because {paper.get('without')}"
        if "preset" in paper:
            how = f"Run it with `fedhet run {method.name} --preset {paper['preset']}`"
        parts += [f"\nThe paper's experiment uses {paper['what']}. {how}."]
    return "\n".join(parts) + "\n"


def _messages(spec: MethodSpec) -> str:
    """Return a sentence with the names of the fields that the server and the clients send."""
    sent = []
    for sender, contract in (
        ("The server sends", spec.instructions),
        ("clients send", spec.replies),
    ):
        names = ", ".join(f"`{field.name}`" for field in contract.fields)
        sent.append(f"{sender} {names or 'nothing'}")
    fields = spec.instructions.fields or spec.replies.fields
    return f"{'; '.join(sent)}." if fields else "Neither the server nor the clients send fields."


def _settings(settings: Mapping[str, FieldInfo]) -> str:
    """Build a section for each table of settings, with abbreviated allowed values."""
    tables: dict[str, list[tuple[str, ...]]] = {}
    for name, default, values, text in setting_rows(settings):
        row = (f"`{name}={default}`", _short(values), text)
        tables.setdefault(name.rpartition(".")[0] or "Run", []).append(row)
    return "".join(
        f"\n## {title}\n\n{in_markdown(REFERENCE_COLUMNS, rows)}" for title, rows in tables.items()
    )


def _short(values: str) -> str:
    """Abbreviate allowed values to a range or choices, or to "" if the default shows the type."""
    single, per_client, _ = values.partition(", or a list to assign to clients")
    text = re.sub(r"\bone of | of strings$|^(string|true or false)$", "", single)
    text = re.sub(r"\b(?:integer|number) >= (\S+) and < (\S+)", r"[\1, \2)", text)
    text = re.sub(r"\b(?:integer|number) > (\S+) and < (\S+)", r"(\1, \2)", text)
    text = re.sub(r"\b(?:integer|number) > (\S+) and <= (\S+)", r"(\1, \2]", text)
    text = re.sub(r"\b(?:integer|number) >= (\S+) and <= (\S+)", r"\1 to \2", text)
    text = re.sub(r"\b(?:integer|number) >= ", "≥", text)
    text = re.sub(r"\b(?:integer|number) > ", ">", text)
    return f"{text}; *per client*" if per_client else text


def _own_settings(method: Method) -> str:
    """Build the table of a method's settings, with paper values that differ from the defaults."""
    name = method.name
    published = {row[0]: row[2] for row in differences(name)} if name in paper_settings() else {}
    rows = []
    for setting, default, values, text in setting_rows(method.settings()):
        choices = [f"`{each}`" for each in values.removeprefix("one of ").split(", ")]
        if values.startswith("one of ") and " or " not in values:
            default = json.loads(default)
            others = "/".join(each for each in choices if each != f"`{default}`")
            first = f"`{setting}={default}` ({others})"
        else:
            first = f"`{setting}={default}`"
        rows.append((first, published.get(f"`{setting}`", ""), text))
    if not any(paper for _, paper, _ in rows):
        return in_markdown(("setting and default", "description"), [(s, d) for s, _, d in rows])
    return in_markdown(("setting and default", "paper", "description"), rows)


def headline(method: Method) -> str:
    """Return a sentence about the model and the test set that represent a method."""
    spec = method.spec
    kind = spec.deployed[spec.headline]
    (other,) = spec.deployed.keys() - {spec.headline}
    more = f" (`{other}`: `{spec.deployed[other]}`)" if spec.deployed[other] != kind else ""
    paper = f" Model in the paper: {spec.paper_model}." if spec.paper_model else ""
    return f"Headline score: `{spec.headline}`, kind `{kind}`{more}.{paper}"


def in_markdown(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Format a Markdown table."""
    lines = (head, ("---",) * len(head), *rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_run_config(pyproject: str) -> str:
    """Return the text of pyproject.toml with all defaults as the run config."""
    before, start, rest = pyproject.partition("[tool.flwr.app.config]\n")
    after = rest[rest.index("[tool.ruff]") :]
    content = tomli_w.dumps(nest(to_flower(defaults() | {CLIENTS: FOLLOW})))
    settings = re.sub(r"^\[", "[tool.flwr.app.config.", content, flags=re.MULTILINE)
    return f"{before}{start}{settings.strip()}\n\n{after}"


# --- settings of the papers' experiments, from paper_settings.toml


@cache
def paper_settings() -> dict[str, Any]:
    """Read paper_settings.toml: a table per method, and a table "why" with shared reasons.

    `tests/test_paper_settings.py` checks the file.
    """
    return tomllib.loads(PAPER_SETTINGS.read_text(encoding="utf-8"))


def differences(name: str) -> list[tuple[str, str, str, str]]:
    """Return (setting, default, value in the paper, reason) for each default that differs.

    If a setting cannot express the paper's value, paper_settings.toml describes the value in words.
    """
    published, reasons = paper_settings()[name].get("settings", {}), paper_settings()["why"]
    rows = []
    for setting, default in resolve({"method": name}).flat().items():
        each = published.get(setting)
        if each and ("words" in each or each["value"] != default):
            words = each.get("words") or f"`{literal(each['value'])}`"
            why = each.get("why") or reasons.get(setting, "")
            source = each["source"].partition(":")[0]
            row = (f"`{setting}`", f"`{literal(default)}`", f"{words} ({source})", why)
            rows.append(row)
    return rows


if __name__ == "__main__":
    for path, text in reference(Path()).items():
        path.write_text(text, encoding="utf-8")
    project = Path("pyproject.toml")
    project.write_text(with_run_config(project.read_text(encoding="utf-8")), encoding="utf-8")
