"""What `fedhet.run`, `fedhet.load` and `fedhet.compare` return: frames, models and a small card."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from torch import nn

from fedhet import report
from fedhet.base.metrics import ACCURACY
from fedhet.inference import Predictions, TrainedClient, clients_in, open_client, samples_for
from fedhet.inference import export as write_model
from fedhet.inference.objects import check_held
from fedhet.report.comparison_report import to_dict
from fedhet.report.page import render
from fedhet.report.tables import comparison_cells, paired_cells
from fedhet.runs.records import NAN, Summary
from fedhet.runs.units import score


class Result:
    """A run on disk: its records as data frames, and its clients' models."""

    def __init__(self, run: report.Run, *, best: bool = False, trust: str = "") -> None:
        """Take what was read of the run; models are read when they are asked for.

        `best`: those after the best round, and not after the last. `trust`: see `fedhet.load`.
        """
        self._run, self._best, self._trust = run, best, trust
        self._open: dict[str, TrainedClient] = {}

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return self._run.path

    @property
    def settings(self) -> Mapping[str, object]:
        """The run's settings by their full names."""
        return self._run.settings

    @property
    def summary(self) -> Summary | None:
        """The content of summary.json; None if the run is unfinished."""
        return self._run.summary

    @property
    def baseline(self) -> Result | None:
        """The run that was trained beside it (`against`), or None."""
        found = self._run.baseline
        return None if found is None else Result(found, best=self._best, trust=self._trust)

    @property
    def accuracy(self) -> float:
        """The headline number: the private models' mean accuracy after the last round; or NaN."""
        return self._run.last(self._run.headline, "private").mean

    @cached_property
    def history(self) -> pd.DataFrame:
        """A row per round: means of scores and losses over the clients, bytes and seconds."""
        columns = {
            ".".join((metric, *column)): view.curve(*column)["mean"]
            for metric, view in self._views()
            for column in dict.fromkeys(
                each[:2] for r in self._run.records for each in r.each(metric)
            )
        }
        costs = self._run.costs[["bytes_up", "bytes_down", "seconds"]]
        found = pd.DataFrame(columns, index=costs.index)
        return found.assign(loss=self._run.mean_loss).join(costs)

    def to_frame(self) -> pd.DataFrame:
        """Return a row per round, client, protocol and kind of model, with its accuracy.

        The metrics besides accuracy are further columns, NaN where a client has none.
        """
        place = ["round", "client", "model", "protocol", "kind"]
        (_, first), *others = self._views()
        found = pd.DataFrame(self._rows(first), columns=[*place, ACCURACY])
        for metric, view in others:
            found = found.merge(pd.DataFrame(self._rows(view), columns=[*place, metric]), "left")
        return found

    def _rows(self, view: report.Run) -> list[tuple[object, ...]]:
        return [
            (record.round, client, self._run.models.get(client, ""), protocol, kind, value)
            for record in view.records
            for protocol, kind, found in record.each(view.metric)
            for client, value in found.per_client.items()
        ]

    def _views(self) -> list[tuple[str, report.Run]]:
        """Return the run by what was measured: accuracy first, then the metrics besides it."""
        names = dict.fromkeys(name for record in self._run.records for name in record.metrics)
        return [(name, self._run.measuring(name)) for name in (ACCURACY, *names)]

    @cached_property
    def clients(self) -> pd.DataFrame:
        """A row per client: model, samples, rounds answered, its last loss, and its last scores."""
        run = self._run
        index = pd.Index(run.clients, name="client")
        answered = [sum(name in each.answered for each in run.records) for name in run.clients]
        about = {
            "model": [run.models.get(name, "") for name in run.clients],
            "samples": [run.samples.get(name) for name in run.clients],
            "answered": answered,
        }
        losses = run.losses.ffill()
        last = losses.iloc[-1].to_dict() if len(losses) else {}
        scores = {
            ".".join((metric, *column)): [
                view.last(*column).per_client.get(name, NAN) for name in run.clients
            ]
            for metric, view in self._views()
            for column in view.columns
        }
        loss = {"loss": [last.get(name, NAN) for name in run.clients]}
        return pd.DataFrame({**about, **loss, **scores}, index=index)

    @property
    def figures(self) -> pd.DataFrame:
        """The method's own numbers, a row per round and a column each."""
        return self._run.figures

    @property
    def plots(self) -> dict[str, Path]:
        """The images of the run's report, by name."""
        return {path.stem: path for path in sorted((self.directory / "figures").glob("*.png"))}

    def best(self) -> Result:
        """Return the same result with the clients' models as they were after the best round.

        The run must have kept them ('keep-best'); StateError is raised when one is missing.
        """
        return Result(self._run, best=True, trust=self._trust)

    def kinds(self, client: str) -> tuple[str, ...]:
        """Return the kinds of model that a client keeps. Raises as `model` does."""
        return self._client(client).kinds

    def model(self, client: str, kind: str = "private") -> nn.Module:
        """Return a client's model, as a module in evaluation mode on the processor.

        It takes x [N, *shape], scaled as in training, and returns logits [N, C], which are minus
        infinity for classes outside the client's label space. Raises StateError for a client or a
        kind that is not there.
        """
        return self._client(client).model(kind)

    def predict(self, client: str, x: Any, kind: str = "private") -> Predictions:
        """Predict samples x [N, *shape], an array or a tensor, with a client's model.

        Bytes (uint8) are scaled as in training; floats must be scaled already. Raises as `model`
        does, and DataError for samples that the model does not take.
        """
        trained = self._client(client)
        return trained.predict(samples_for(trained.record, x), kind)

    def export(
        self, client: str, out: str | Path, *, form: str = "", kind: str = "private"
    ) -> Path:
        """Write a client's model to `out` and its card next to it; return the card's path.

        `form` is safetensors, pt2 or onnx, by default as the name of `out` ends. Raises as
        `fedhet.inference.export` does.
        """
        path = Path(out)
        return write_model(self._client(client), form or path.suffix.lstrip("."), path, kind)

    def _client(self, name: str) -> TrainedClient:
        if name not in self._open:
            check_held(self.settings)
            self._open[name] = open_client(self.directory, name, best=self._best, trust=self._trust)
        return self._open[name]

    def __repr__(self) -> str:
        run = self._run
        state = "" if run.finished else ", unfinished"
        number = f"accuracy ({run.headline}) {score(self.accuracy)}" if run.headline else ""
        said = f"{len(run.clients)} clients, round {run.done} of {run.planned}{state}"
        return f"<Result of {run.method} on {run.dataset}: {said}; {number or 'not evaluated'}>"

    def _repr_html_(self) -> str:
        return render("card.html", run=self._run, models=clients_in(self.directory))


class ComparedRuns:
    """Runs side by side, grouped over their seeds."""

    def __init__(self, comparison: report.Comparison) -> None:
        """Take a comparison of runs."""
        self.comparison = comparison

    def to_frame(self) -> pd.DataFrame:
        """Return a row per group, best first: mean and std of its accuracies, and its cost."""
        content: Any = to_dict(self.comparison)
        metric = content["metric"]
        rows = [
            {
                "method": group["method"],
                "dataset": group["dataset"],
                "seeds": len(group["seeds"]),
                **{
                    f"{metric}.{protocol}.{kind}.{which}": spread[which]
                    for protocol, kinds in group[metric].items()
                    for kind, spread in kinds.items()
                    for which in ("mean", "std")
                },
                "bytes_up": group["bytes_up"]["mean"],
                "bytes_down": group["bytes_down"]["mean"],
                "seconds": group["seconds"]["mean"],
            }
            for group in content["groups"]
        ]
        labels = [group["label"] for group in content["groups"]]
        return pd.DataFrame(rows, index=pd.Index(labels, name="run"))

    def __repr__(self) -> str:
        return str(self.to_frame())

    def _repr_html_(self) -> str:
        tables = [comparison_cells(self.comparison), paired_cells(self.comparison)]
        notes = self.comparison.notes
        return render("cards.html", tables=[table for table in tables if table], notes=notes)
