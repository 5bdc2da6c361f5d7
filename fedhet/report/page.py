"""The HTML pages: one self-contained file each, readable on paper and on a phone."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import pandas as pd
from jinja2 import Environment, FunctionLoader, StrictUndefined

from fedhet.base.disk import write_text
from fedhet.methods.registry import find_method, shipped_names
from fedhet.report import canvas, figures
from fedhet.report.comparison import Comparison
from fedhet.report.run import TEST_SETS, Run, load_run, lowest
from fedhet.report.style import Drawing
from fedhet.report.tables import (
    Cells,
    away_lines,
    baseline_line,
    client_cells,
    comparison_cells,
    legend,
    majority_line,
    paired_cells,
    paired_legend,
    recall_cells,
)
from fedhet.runs.records import NAN
from fedhet.runs.units import (
    ABSENT,
    human_bytes,
    human_number,
    human_seconds,
    percent,
    plural,
    printable,
    score,
    shown_path,
    spans,
)
from fedhet.settings.text import as_text

SPARKS = 24
"""Maximum number of the method's own metrics that get a small curve."""


@dataclass(frozen=True)
class Live:
    """What a served page has besides a written one."""

    status: str
    """Where the status of its run is."""
    rounds: int
    """How many rounds are recorded: when there are more, the page is loaded again."""
    home: bool
    """Whether there is a list of runs to go back to."""


def write_report(path: Path | str) -> Path:
    """Write `report.html` into a run's directory and return its path."""
    return write_page(load_run(path))


def write_page(run: Run) -> Path:
    """Write `report.html` into a run's directory and return its path."""
    return write_text(run.path / "report.html", render_run(run))


def render(template: str, package: str = "fedhet.report", **content: object) -> str:
    """Return a page of a package's template; texts are escaped, never treated as markup.

    What a template extends or imports is in this package. The name of each file ends in `.md`: a
    Flower app bundle (FAB) carries no .html, .css or .js.
    """

    def read(name: str) -> str:
        own = files(package) / f"{name}.md"
        return (own if own.is_file() else files("fedhet.report") / f"{name}.md").read_text("utf-8")

    environment = Environment(
        loader=FunctionLoader(read),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    shown = (human_bytes, human_seconds, lowest, percent, plural, score, as_text, spans)
    environment.filters |= {function.__name__: function for function in shown}
    environment.filters["where"] = _where
    environment.filters["key"] = lambda value: "" if math.isnan(value) else repr(float(value))
    environment.globals |= {"TEST_SETS": TEST_SETS, "NAN": NAN, "ABSENT": ABSENT}
    return environment.get_template(template).render({"live": None} | content)


def render_run(run: Run, live: Live | None = None) -> str:
    """Return the page of one run; `live`: of a page that is served."""
    own = run.figures
    over_rounds = [name for name in own if own[name].nunique() > 1]
    once = {name: own[name].dropna() for name in own if name not in over_rounds}
    about = ""
    if run.method in shipped_names():  # a method of one's own would be imported
        spec = find_method(run.method).spec
        about = f"{run.method}: {spec.title}. {spec.paper}"
    return render(
        "run.html",
        run=run,
        title=f"{run.method} on {run.dataset}",
        about=about,
        name=run.path.resolve().name,
        hero=_hero(run),
        legend=legend(run),
        accuracy=[figures.accuracy(run, [name]).chart() for name in run.protocols],
        metrics=[drawn.chart() for each in run.besides if (drawn := figures.metrics([each]))],
        plots={d.name: d.chart() for d in figures.drawings(run) if d.name != "accuracy"},
        sparks=[_spark(run.title_of(name), own[name]) for name in over_rounds[:SPARKS]],
        once=[
            {
                "name": run.title_of(name),
                "value": human_number(known.iloc[-1]) if len(known) else ABSENT,
                "rounds": spans(known.index),
            }
            for name, known in once.items()
        ],
        clients=client_cells(run),
        recalls=recall_cells(run),
        away=[*filter(None, [majority_line(run)]), *away_lines(run)],
        command=_command(run),
        live=live,
    )  # fmt: skip


def render_comparison(comparison: Comparison, panels: Sequence[Drawing]) -> str:
    """Return the page of a comparison."""
    shared, differing = _settings(comparison)
    return render(
        "comparison.html",
        title="Comparison",
        comparison=comparison,
        groups=comparison.groups,
        datasets=sorted({group.dataset for group in comparison.groups}),
        hero=_lead(comparison),
        table=_informative(comparison_cells(comparison)),
        paired=paired_cells(comparison),
        paired_basis=paired_legend(comparison),
        plots=[panel.chart() for panel in panels],
        shared=shared,
        differing=differing,
    )  # fmt: skip


def _command(run: Run) -> str:
    """Return the command that repeats a run, with a path from the working folder if it is in it."""
    config = shown_path(run.path.resolve() / "config.toml")
    if not run.origin.deployed:
        return shlex.join(["fedhet", "run", run.method, "--config", config])
    server = ["--server", "HOST:PORT", "--ca", "FILE"]
    return shlex.join(["fedhet", "submit", run.method, *server, "--config", config])


def _where(protocol: str) -> str:
    name = TEST_SETS.get(protocol, protocol)
    return f"on each client's {name}" if protocol == "personal" else f"on the {name}"


def _hero(run: Run) -> dict[str, object] | None:
    """Return the headline: the last round's mean and spread, with the tail and the best."""
    if not run.columns:
        return None
    protocol, kind = run.columns[0]
    last, curve = run.last(protocol, kind), run.curve(protocol, kind)
    means = curve["mean"].dropna()
    when = "last round" if run.finished else f"round {curve.index[-1]}, the last so far"
    return {
        "score": last,
        "what": f"mean accuracy of the {kind} models {_where(protocol)}, {when}",
        "clients": run.counted(protocol, kind),
        "majority": run.majority_mean(protocol),
        "against": baseline_line(run).partition(": "),
        "tail": run.tail(protocol, kind),
        "best": f"{score(means.max())} in round {means.idxmax()}" if len(means) else ABSENT,
    }


def _spark(title: str, values: pd.Series, width: float = 192, height: float = 36) -> dict[str, str]:
    """Return a changing metric's last value, its range, and its curve as SVG paths.

    The curve has a gap for each NaN. `chart` is what the page shows of it; see `canvas`.
    """
    known = values.dropna()
    x = 4 + width * _unit(values.index.to_series())
    y = 4 + height * (1 - _unit(values))
    places = x.round(1).astype(str) + " " + y.round(1).astype(str)
    pens = pd.Series("L", values.index).where(values.shift().notna(), "M")
    low, high = known.min(), known.max()
    return {
        "name": title,
        "last": human_number(known.iloc[-1]),
        "span": f"{human_number(low)} to {human_number(high)}",
        "path": "".join((pens + places)[known.index]),
        "dot": f"M{places[known.index[-1]]}h0",
        "chart": canvas.lone_curve(known, (4, 4, 4 + width, 4 + height), values.index),
    }


def _unit(values: pd.Series) -> pd.Series:
    """Return values, which are not all equal, scaled to [0, 1]."""
    low, high = values.min(), values.max()
    return (values - low) / (high - low)


def _lead(comparison: Comparison) -> dict[str, str]:
    """Return the best headline value, and its distance to the others."""
    means = [(g.label, g.score(comparison.headline)) for g in comparison.groups]
    (label, best), *others = [(name, spread) for name, spread in means if spread.n]
    protocol, kind = comparison.headline
    rows = {"std over seeds": score(best.std)} if best.n > 1 else {}
    lower = comparison.metric.lower_is_better
    worse, last = ("above", "highest") if lower else ("below", "lowest")
    if others:
        rows["next"] = f"{others[0][0]}, {abs(best.mean - others[0][1].mean):.4f} {worse}"
    if len(others) > 1:
        rows[last] = f"{others[-1][0]}, {abs(best.mean - others[-1][1].mean):.4f} {worse}"
    of = f"mean {comparison.metric.title} of {label}"
    what = f"{of}: {kind} models {_where(protocol)}, last round"
    return {"value": score(best.mean), "what": what, **rows}


def _informative(cells: Cells) -> Cells:
    """Return the table without the columns that are empty or repeat what the page's title says."""
    kept = {
        header: column
        for header, column in cells.columns.items()
        if {cell.text for cell in column} != {ABSENT}
        and (header != "data set" or len({cell.text for cell in column}) > 1)
    }
    return Cells(kept, words=sum(header in ("run", "data set") for header in kept))


def _settings(comparison: Comparison) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the settings that all groups share, and those in which they differ.

    A setting that a group's method does not have is no difference.
    """
    table = pd.DataFrame([group.settings for group in comparison.groups])
    differs = table.nunique() > 1
    shared = table.loc[:, ~differs].bfill().iloc[0].fillna(ABSENT)
    return shared.to_dict(), table.loc[:, differs].fillna(ABSENT).to_dict("list")
