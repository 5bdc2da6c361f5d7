"""The HTML pages: one self-contained file each, readable on paper and on a phone."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
import pandas as pd
from jinja2 import Environment, FunctionLoader, StrictUndefined

from fedhet.base.disk import write_text
from fedhet.methods.registry import find_method, shipped_names
from fedhet.report import figures, style
from fedhet.report.run import TEST_SETS, Run, lowest
from fedhet.report.tables import baseline_line, client_cells, legend, recall_cells, remarks
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
    environment.filters["where"] = where
    environment.filters["key"] = lambda value: "" if math.isnan(value) else repr(float(value))
    environment.globals |= {"TEST_SETS": TEST_SETS, "NAN": NAN, "ABSENT": ABSENT}
    return environment.get_template(template).render({"live": None} | content)


def render_run(run: Run, live: Live | None = None) -> str:
    """Return the page of one run; `live`: of a page that is served."""
    own = run.figures
    over_rounds = [name for name in own if own[name].nunique() > 1]
    once = {name: own[name].dropna() for name in own if name not in over_rounds}
    about, hero = "", {}
    if run.method in shipped_names():  # a method of one's own would be imported
        spec = find_method(run.method).spec
        about = f"{run.method}: {spec.title}. {spec.paper}"
    if run.columns:
        (protocol, kind), curve = run.columns[0], run.curve(*run.columns[0])
        means = curve["mean"].dropna()
        when = "last round" if run.finished else f"round {curve.index[-1]}, the last so far"
        hero = {
            "score": run.last(protocol, kind),
            "what": f"mean accuracy of the {kind} models {where(protocol)}, {when}",
            "clients": run.counted(protocol, kind),
            "majority": float(np.mean([*run.majority(protocol).values()] or NAN)),
            "against": baseline_line(run).partition(": "),
            "tail": run.tail(protocol, kind),
            "best": f"{score(means.max())} in round {means.idxmax()}" if len(means) else ABSENT,
        }
    drawings = figures.drawings(run)
    config = shown_path(run.path.resolve() / "config.toml")
    command = ["fedhet", "submit" if run.origin.deployed else "run", run.method]
    command += ["--server", "HOST:PORT", "--ca", "FILE"] if run.origin.deployed else []
    command += ["--config", config]
    command += ["--against", run.baseline.method] if run.baseline else []
    peak = max(record.peak_memory_mb for record in run.records) or NAN
    return render(
        "run.html",
        run=run,
        title=f"{run.method} on {run.dataset}",
        about=about,
        name=run.path.resolve().name,
        hero=hero,
        legend=legend(run),
        accuracy=[figures.accuracy(run, [name]).chart() for name in run.protocols],
        metrics=[drawn.chart() for each in run.besides if (drawn := figures.metrics([each]))],
        plots={d.name: d.chart() for d in drawings if d.name not in ("accuracy", "method")},
        peak=1e6 * (run.summary.peak_memory_mb if run.summary else peak),
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
        remarks=remarks(run),
        command=shlex.join(command),
        live=live,
    )  # fmt: skip


def where(protocol: str) -> str:
    """Return the test set of a protocol, as "on the common test set"."""
    name = TEST_SETS.get(protocol, protocol)
    return f"on each client's {name}" if protocol == "personal" else f"on the {name}"


def _spark(title: str, values: pd.Series, width: float = 192, height: float = 36) -> dict[str, str]:
    """Return a changing metric's last value, its range, and its curve as SVG paths.

    The curve has a gap for each NaN. `chart` is what the page shows of it; see `style.Canvas`.
    """

    def unit(values: pd.Series) -> pd.Series:  # they are not all equal
        return (values - values.min()) / (values.max() - values.min())

    known = values.dropna()
    x = 4 + width * unit(values.index.to_series())
    y = 4 + height * (1 - unit(values))
    places = x.round(1).astype(str) + " " + y.round(1).astype(str)
    pens = pd.Series("L", values.index).where(values.shift().notna(), "M")
    low, high = known.min(), known.max()
    return {
        "name": title,
        "last": human_number(known.iloc[-1]),
        "span": f"{human_number(low)} to {human_number(high)}",
        "path": "".join((pens + places)[known.index]),
        "dot": f"M{places[known.index[-1]]}h0",
        "chart": style.lone_curve(known, (4, 4, 4 + width, 4 + height), values.index),
    }
