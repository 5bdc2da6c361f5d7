"""The pages: one HTML file each, which needs nothing else, and is read on paper as on a phone."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from fedhet.report import figures
from fedhet.report.groups import Comparison
from fedhet.report.run import PROTOCOLS, Run, Score, load_run
from fedhet.report.style import Drawing
from fedhet.report.tables import client_cells, comparison_cells
from fedhet.report.units import (
    ABSENT,
    human_bytes,
    human_number,
    human_seconds,
    percent,
    plural,
    printable,
    score,
    setting,
    spans,
)

SPARKS = 24
"""So many of a method's own figures get a small curve."""


@dataclass(frozen=True)
class Card:
    """A number with its name, and a line of context."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Spark:
    """One of the method's own figures: its last value and its course."""

    name: str
    last: str
    span: str
    path: str
    dot: tuple[float, float]


def write_report(path: Path | str) -> Path:
    """Write `report.html` into a run's directory and return its path."""
    run = load_run(path)
    target = run.path / "report.html"
    target.write_text(render_run(run), "utf-8")
    return target


def render_run(run: Run) -> str:
    """Return the page of one run."""
    return _environment().get_template("run.html").render(
        title=f"{run.method} on {run.dataset}",
        facts=_facts(run),
        state="" if run.finished else f"unfinished: {run.done} of {run.planned} rounds",
        notes=run.notes,
        hero=_hero(run),
        scores=_scores(run),
        cards=_cards(run),
        accuracy=[_svg(figures.accuracy(run, [name])) for name in run.protocols],
        plots={d.name: _svg(d) for d in figures.drawings(run) if d.name != "accuracy"},
        sparks=_sparks(run),
        clients=client_cells(run),
        failures=[(f.client, len(f.rounds), spans(list(f.rounds)), f.reason) for f in run.failures],
        settings={key: setting(value) for key, value in run.settings.items()},
        versions=run.summary.versions if run.summary else {},
        command=f"fedhet run {shlex.quote(run.method)} --config config.toml",
    )  # fmt: skip


def write_comparison_page(comparison: Comparison, panels: Sequence[Drawing], target: Path) -> Path:
    """Write the page of a comparison and return its path."""
    runs = [run for group in comparison.groups for run in group.runs]
    shared, differing = _settings(comparison)
    html = _environment().get_template("comparison.html").render(
        title="Comparison",
        facts=[
            plural(len(comparison.groups), "group"), plural(len(runs), "run"),
            ", ".join(sorted({run.dataset for run in runs})),
        ],
        hero=_lead(comparison),
        basis=_basis(comparison),
        notes=comparison.notes,
        table=comparison_cells(comparison),
        plots=[_svg(panel) for panel in panels],
        runs=[
            (group.label, run, score(run.last(*comparison.headline).mean))
            for group in comparison.groups for run in group.runs
        ],
        shared=shared,
        differing=differing,
        labels=[group.label for group in comparison.groups],
    )  # fmt: skip
    target.write_text(html, "utf-8")
    return target


def _environment() -> Environment:
    """Return the templates' environment; whatever a run says is text, never markup."""
    folder = files("fedhet.report")
    return Environment(
        loader=FunctionLoader(lambda name: folder.joinpath(name).read_text("utf-8")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )


def _svg(drawing: Drawing) -> Markup:
    """Return a drawing as markup; matplotlib has escaped the names in it."""
    return Markup(drawing.svg())  # noqa: S704


def _facts(run: Run) -> list[str]:
    models = len(set(run.models.values()))
    facts = [plural(len(run.clients), "client")] if run.clients else []
    facts += [plural(models, "model")] if models else []
    facts.append(plural(run.planned, "round"))
    return [*facts, f"seed {run.seed}"] if run.seed is not None else facts


def _where(protocol: str) -> str:
    name = PROTOCOLS.get(protocol, protocol)
    return f"on each client's {name}" if protocol == "personal" else f"on the {name}"


def _hero(run: Run) -> dict[str, object] | None:
    """Return the headline: the last round's mean, and beside it its spread and the best round."""
    if not run.columns:
        return None
    protocol, kind = run.columns[0]
    last, curve = run.last(protocol, kind), run.curve(protocol, kind)
    known = [(s.mean, -number) for number, s in curve if math.isfinite(s.mean)]
    best = max(known, default=None)
    when = "last round" if run.finished else f"round {curve[-1][0]}, the last so far"
    return {
        "value": score(last.mean),
        "what": f"mean accuracy of the {kind} models {_where(protocol)}, {when}",
        "std": score(last.std),
        "worst": _worst(last),
        "best": f"{score(best[0])} in round {-best[1]}" if best else ABSENT,
    }


def _worst(scores: Score) -> str:
    name = printable(scores.worst_client)
    return score(scores.worst) + (f" ({name})" if name else "")


def _scores(run: Run) -> list[tuple[str, str, str, str, str]]:
    """Return every protocol and kind of the last round, where there is more than the headline."""
    if len(run.columns) < 2:
        return []
    rows = []
    for protocol, kind in run.columns:
        last = run.last(protocol, kind)
        name = PROTOCOLS.get(protocol, protocol)
        rows.append((kind, name, score(last.mean), score(last.std), _worst(last)))
    return rows


def _cards(run: Run) -> list[Card]:
    rounds, asked = len(run.records), sum(len(record.asked) for record in run.records)
    lost = sum(len(failure.rounds) for failure in run.failures)
    seconds = run.seconds.get("total", math.nan)
    memory = run.summary.peak_memory_mb if run.summary else math.nan
    each = f"{human_seconds(seconds / rounds)} a round" if math.isfinite(seconds) else ""
    share = f"of {asked:,} asked for" if asked else ""
    return [
        Card("sent up", human_bytes(run.bytes_up), f"{human_bytes(run.bytes_up / rounds)} a round"),
        Card(
            "sent down", human_bytes(run.bytes_down),
            f"{human_bytes(run.bytes_down / rounds)} a round",
        ),
        Card("wall time", human_seconds(seconds), each),
        Card("peak memory", human_bytes(memory * 1e6)),
        Card("replies lost", f"{lost:,}", share),
    ]  # fmt: skip


def _sparks(run: Run) -> list[Spark]:
    names = dict.fromkeys(name for record in run.records for name in record.method)
    return [_spark(run, name) for name in list(names)[:SPARKS]]


def _spark(run: Run, name: str, width: float = 200, height: float = 44) -> Spark:
    """Return a small curve of one figure, a gap where it is not a number."""
    points = [(record.round, record.method.get(name, math.nan)) for record in run.records]
    known = [(x, y) for x, y in points if math.isfinite(y)]
    if not known:
        return Spark(name, ABSENT, "", "", (0, 0))
    low, high = min(y for _, y in known), max(y for _, y in known)
    first, last = points[0][0], points[-1][0]

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - first) / (last - first) if last > first else 1.0
        up = (y - low) / (high - low) if high > low else 0.5
        return round(4 + across * (width - 8), 1), round(height - 4 - up * (height - 8), 1)

    path, pen = [], "M"
    for x, y in points:
        if math.isfinite(y):
            path.append(f"{pen}{place(x, y)[0]} {place(x, y)[1]}")
        pen = "L" if math.isfinite(y) else "M"
    span = f"{human_number(low)} to {human_number(high)}" if high > low else "constant"
    return Spark(name, human_number(known[-1][1]), span, "".join(path), place(*known[-1]))


def _lead(comparison: Comparison) -> dict[str, str]:
    """Return the highest headline accuracy, and how far the others are from it."""
    means = [(g.label, g.score(comparison.headline)) for g in comparison.groups]
    (label, best), *others = [(name, spread) for name, spread in means if spread.n]
    protocol, kind = comparison.headline
    rows = {"std over seeds": score(best.std)} if best.n > 1 else {}
    if others:
        rows["next"] = f"{others[0][0]}, {best.mean - others[0][1].mean:.4f} below"
    if len(others) > 1:
        rows["lowest"] = f"{others[-1][0]}, {best.mean - others[-1][1].mean:.4f} below"
    what = f"mean accuracy of {label}: {kind} models {_where(protocol)}, last round"
    return {"value": score(best.mean), "what": what, **rows}


def _basis(comparison: Comparison) -> str:
    protocol, kind = comparison.headline
    return (
        f"Last round's mean over clients, ± standard deviation over seeds. Ordered by the {kind} "
        f"models' accuracy {_where(protocol)}. Bytes to {percent(comparison.target)}: sent up and "
        "down until that accuracy was first reached."
    )


def _settings(
    comparison: Comparison,
) -> tuple[Mapping[str, str], Mapping[str, Sequence[str]]]:
    """Return the settings that all groups share, and those in which they differ."""
    groups = [group.settings for group in comparison.groups]
    shared: dict[str, str] = {}
    differing: dict[str, Sequence[str]] = {}
    for key in dict.fromkeys(key for settings in groups for key in settings):
        values = [settings.get(key, ABSENT) for settings in groups]
        if len(set(values)) == 1:
            shared[key] = values[0]
        else:
            differing[key] = values
    return shared, differing
