"""HTML reports: self-contained files that are also readable on paper and on a phone."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import pandas as pd
from jinja2 import Environment, FunctionLoader, StrictUndefined

from fedhet.base.disk import write_text
from fedhet.methods.registry import find_method, shipped_names
from fedhet.report import figures, style
from fedhet.report.run import TEST_SETS, Run, client_with, where
from fedhet.report.tables import (
    baseline_line,
    client_cells,
    confusion_note,
    constant_of,
    constant_score,
    frequent_confusions,
    label_cells,
    legend,
    missing_confusion,
    remarks,
)
from fedhet.runs.measures import best_round
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
from fedhet.settings.schema import as_text

MAX_SPARKLINES = 24
"""Maximum number of method metrics with a sparkline."""
MAX_COUNTS = 30
"""Maximum number of classes for which a report contains a table of the confusion matrix."""


@dataclass(frozen=True)
class Live:
    """Additional content for a report that `fedhet watch` serves."""

    status: str
    """URL from which to load the run's status."""
    rounds: int
    """Number of recorded rounds; the report is reloaded when this number increases."""
    home: bool
    """Whether to link to the list of runs."""


def write_report(run: Run) -> Path:
    """Write `report.html` into the directory of a run and return its path."""
    return write_text(run.path / "report.html", render_run(run))


def render(template: str, package: str = "fedhet.report", **content: object) -> str:
    """Render a package's template to HTML, with all text escaped.

    Templates can extend or include templates of `fedhet.report`. Their file names end in `.md`,
    because a Flower app bundle (FAB) contains no .html, .css or .js files.
    """

    def source_of(name: str) -> str:
        path = files(package) / f"{name}.md"
        default = files("fedhet.report") / f"{name}.md"
        return (path if path.is_file() else default).read_text("utf-8")

    environment = Environment(
        loader=FunctionLoader(source_of),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    shown = (human_bytes, human_seconds, client_with, percent, plural, score, as_text, spans)
    environment.filters |= {function.__name__: function for function in shown}
    environment.filters["where"] = where
    environment.filters["key"] = lambda value: "" if math.isnan(value) else repr(float(value))
    environment.globals |= {"TEST_SETS": TEST_SETS, "NAN": NAN, "ABSENT": ABSENT}
    environment.globals["VARIABLES"] = style.VARIABLES
    return environment.get_template(template).render({"live": None} | content)


def render_run(run: Run, live: Live | None = None) -> str:
    """Return the HTML report of a run, with the additional content `live` for a served report."""
    metrics = run.method_metrics
    over_rounds = [name for name in metrics if metrics[name].nunique() > 1]
    once = {name: metrics[name].dropna() for name in metrics if name not in over_rounds}
    about, hero = "", {}
    if run.method in shipped_names():  # Do not import a user's method.
        spec = find_method(run.method).spec
        about = f"{run.method}: {spec.title}. {spec.paper}"
    if run.columns:
        (protocol, kind), curve = run.columns[0], run.curve(*run.columns[0])
        means = curve["mean"].dropna()
        title, best = run.metric_title, ABSENT
        if (number := best_round(run.records, run.declared_headline)) in means.index:
            value = score(means[number], run.metric)
            best = f"{value} in round {number}, selected on {run.selection_basis}"
        when = "last round" if run.finished else f"round {curve.index[-1]}, the last so far"
        hero = {
            "score": run.last(protocol, kind),
            "description": f"mean {title} of the {kind} models {where(protocol)}, {when}",
            "clients": run.client_count(protocol, kind),
            "constant": constant_of(run)[1]
            .removeprefix("always predicting ")
            .removeprefix("the ")
            .removesuffix(" of the test set"),
            "majority": constant_score(run, protocol),
            "against": baseline_line(run).partition(": "),
            "tail": run.tail(protocol, kind),
            "best": best,
        }
    matrices = run.confusion_matrices
    confusions = [
        {
            "title": title,
            "chart": drawing.chart(),
            "errors": frequent_confusions(matrix.counts, run.class_names),
            "counts": matrix.counts if len(matrix.counts) <= MAX_COUNTS else [],
        }
        for (title, matrix), drawing in zip(matrices.items(), figures.confusions(run), strict=False)
    ]
    drawings = [d for d in figures.drawings(run) if not d.name.startswith("confusion")]
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
        metrics=[drawn.chart() for each in run.extra_metrics if (drawn := figures.metrics([each]))],
        plots={d.name: d.chart() for d in drawings if d.name not in ("accuracy", "method")},
        peak=1e6 * (run.summary.peak_memory_mb if run.summary else peak),
        sparks=[
            _sparkline(run.title_of(name), metrics[name]) for name in over_rounds[:MAX_SPARKLINES]
        ],
        once=[
            {
                "name": run.title_of(name),
                "value": human_number(values.iloc[-1]) if len(values) else ABSENT,
                "rounds": spans(values.index),
            }
            for name, values in once.items()
        ],
        confusions=confusions,
        confusion_note=confusion_note(run),
        no_confusion=missing_confusion(run) if run.finished else "",
        clients=client_cells(run),
        by_label=label_cells(run),
        remarks=remarks(run),
        command=shlex.join(command),
        live=live,
    )  # fmt: skip


def _sparkline(
    title: str, values: pd.Series, width: float = 192, height: float = 36
) -> dict[str, str]:
    """Return the last value and the range of a metric, and its sparkline as SVG paths.

    NaN values appear as gaps.
    """

    # Scale the values to [0, 1]; the range is positive, because the values are not all equal.
    def scaled(values: pd.Series) -> pd.Series:
        return (values - values.min()) / (values.max() - values.min())

    valid = values.dropna()
    x = 4 + width * scaled(values.index.to_series())
    y = 4 + height * (1 - scaled(values))
    points = x.round(1).astype(str) + " " + y.round(1).astype(str)
    pens = pd.Series("L", values.index).where(values.shift().notna(), "M")
    low, high = valid.min(), valid.max()
    return {
        "name": title,
        "last": human_number(valid.iloc[-1]),
        "span": f"{human_number(low)} to {human_number(high)}",
        "path": "".join((pens + points)[valid.index]),
        "dot": f"M{points[valid.index[-1]]}h0",
    }
