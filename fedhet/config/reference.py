"""Generates files from the declarations in the code.

docs/reference.md: every setting and every field of a message. pyproject.toml: the default run
config of `flwr run`. fedhet/_generated/methods.json: what the commands need of the methods without
importing them. `python -m fedhet.config.reference`, in the project's root, writes all three.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic.fields import FieldInfo

from fedhet.config.declared import Declared, declarations_json, declared_by
from fedhet.config.sources import defaults_toml
from fedhet.methods.registry import find_method, shipped_names
from fedhet.settings.run import RunSettings
from fedhet.settings.schema import takes

HEAD = """# Reference

Made from the declarations in the code by `make reference`; not written by hand.

## Settings of every run

On the command line by `--set NAME=VALUE`, in a TOML file by `--config`, in `flwr run` by
`--run-config`.
"""

SETTING_COLUMNS = ("setting", "default", "takes", "what it is")
FIELD_COLUMNS = ("field", "type", "what it is")


def reference() -> str:
    """Return the reference page as Markdown."""
    parts = [HEAD, _settings(RunSettings.fields()), "\n## Methods\n"]
    parts += [_method(declared_by(find_method(name))) for name in sorted(shipped_names())]
    return "\n".join(parts)


def _method(method: Declared) -> str:
    parts = [
        f"### {method.name}\n",
        f"{method.title[0].upper()}{method.title[1:]}. {method.paper}.",
        f"Headline: the {method.headline} protocol. {method.models}\n",
    ]
    if method.settings():
        parts.append(_settings(method.settings()))
    parts.append(_fields("The server sends", method.server_sends))
    parts.append(_fields("A client sends", method.client_sends))
    return "\n".join(parts)


def _settings(settings: Mapping[str, FieldInfo]) -> str:
    rows = [(f"`{n}`", f"`{d}`", takes, help_) for n, d, takes, help_ in setting_rows(settings)]
    return _table(SETTING_COLUMNS, rows)


def setting_rows(
    settings: Mapping[str, FieldInfo], *, brief: bool = False
) -> list[tuple[str, str, str, str]]:
    """Return each setting's name, default, allowed values (see `allowed`) and description."""
    return [
        (name, _literal(info.default), takes(info, brief=brief), info.description or "")
        for name, info in settings.items()
    ]


def _literal(value: object) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else str(value)


def _fields(title: str, fields: Iterable[tuple[str, str, str]]) -> str:
    rows = [(f"`{name}`", kind, line) for name, kind, line in fields]
    return f"{title}:\n\n{_table(FIELD_COLUMNS, rows)}" if rows else f"{title} nothing.\n"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_run_config(pyproject: str) -> str:
    """Return the text of pyproject.toml with every setting's default as the run config."""
    before, start, rest = pyproject.partition("[tool.flwr.app.config]\n")
    after = rest[rest.index("[tool.ruff]") :]
    settings = re.sub(r"^\[", "[tool.flwr.app.config.", defaults_toml(), flags=re.MULTILINE)
    return f"{before}{start}{settings.strip()}\n\n{after}"


def _write() -> None:
    # Before the other two, which read it.
    Path("fedhet/_generated/methods.json").write_text(declarations_json(), encoding="utf-8")
    Path("docs/reference.md").write_text(reference(), encoding="utf-8")
    project = Path("pyproject.toml")
    project.write_text(with_run_config(project.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    _write()
