"""Figures of two papers that show single samples or models (docs/tables.md).

    python examples/paper_figures.py sets        # FedType, Fig. 7 and the epochs of Table 7
    python examples/paper_figures.py features    # UM-pFSSL, Fig. 9
    python examples/paper_figures.py confusion   # UM-pFSSL, Fig. 11

Each command executes the runs of a table with one seed, or reuses them, and writes the figure and
its numbers to a directory (`--out`). `--size` selects the size of the table.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from sklearn.manifold import TSNE
from sklearn.metrics import ConfusionMatrixDisplay, confusion_matrix

import fedhet
from fedhet.algorithms.conformal import prediction_sets
from fedhet.algorithms.local_models import LocalModel
from fedhet.clients import fedtype
from fedhet.experiments.plan import plan, read_table
from fedhet.learning.training import evaluating

ROUND = 50
"""Round in which Table 7 of FedType shows the epochs, or the last round of a shorter run."""
MIX = ("FixAvg", "FixProx", "FixBN")
"""Methods of UM-pFSSL's Fig. 11 whose outputs are averaged."""


def values_of(table: str, row: str, column: str, size: str, seed: int) -> dict[str, object]:
    """Return the settings of a cell's run."""
    cells = plan(table, read_table(table), size, [seed], Path()).cells
    return next(c for c in cells if (c.row.name, c.column.name) == (row, column)).runs[seed].values


def made(directory: Path, values: dict[str, object]) -> fedhet.Result:
    """Return the result of a run with the given settings; execute the run if it is missing."""
    if (directory / "summary.json").exists():
        return fedhet.load(directory)
    return fedhet.run(settings={**values, "engine.backend": "inline"}, out=directory)


def write(figure: Figure, numbers: pd.DataFrame, stem: Path) -> None:
    """Write a figure and its numbers, and print the numbers."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(stem.with_suffix(".png"), dpi=160)
    numbers.to_csv(stem.with_suffix(".csv"), index=False)
    print(f"{numbers.to_string(index=False)}\n{stem.with_suffix('.png')}")


class Recorded(fedtype.Reciprocity):
    """FedType's training on a client, which records the conformal sets after each epoch."""

    rows: list[dict[str, object]] = []

    def __init__(self, client: fedtype.FedTypeClient, proxy: LocalModel, round: int) -> None:
        """Start a round."""
        super().__init__(client, proxy, round)
        self.round = round

    @torch.no_grad()
    def sets(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sets [N, C] of the private model and the proxy for the client's samples.

        They have the thresholds of the last epoch. With the constant factor u = 0.5, they take no
        random number from the run.
        """
        x = self.client.compute.to_inputs(self.client.x)
        both = []
        for model, calibration in zip(
            (self.private, self.teacher.model), reversed(self.imitation.calibrations), strict=True
        ):
            with evaluating(model):
                logits = self.within(model(x))[:, self.imitation.labels]
            shrinks = model is not self.private or self.settings.shrinks == "both"
            penalty = self.imitation.penalty if shrinks else self.imitation.raps.penalty
            u = torch.full((len(x),), 0.5)
            raps = {"penalty": penalty, "k_reg": self.imitation.raps.k_reg}
            both.append(prediction_sets(logits, calibration, u, **raps))
        return both[0], both[1]

    def run_epoch(self, epoch: int) -> None:
        """Train for an epoch, and record the sets and the proxy's accuracy in Eq. 7."""
        super().run_epoch(epoch)
        if not self.imitation.calibrations:
            return
        private, proxy = self.sets()
        classes = self.client.space[self.imitation.labels]
        self.rows.append(
            {
                "client": self.client.info.name, "round": self.round, "epoch": epoch + 1,
                "accuracy": self.imitation.accuracy,
                "proxy_set": float(proxy.sum(1).float().mean()),
                "label": int(self.client.y[0]),
                "private": classes[private[0]].tolist(), "proxy": classes[proxy[0]].tolist(),
            }
        )  # fmt: skip


def draw_sets(size: str, seed: int, out: Path) -> None:
    """Draw both sets of a sample over the rounds, and list accuracies and set sizes by epoch."""
    fedtype.Reciprocity = Recorded
    Recorded.rows.clear()
    values = values_of("fedtype-7", "g1", "accuracy", size, seed)
    fedhet.run(settings={**values, "engine.backend": "inline", "resume": False}, out=out / "sets")
    rows = pd.DataFrame(Recorded.rows)
    first = rows[rows["client"] == rows["client"].iloc[0]]
    by_round = first.groupby("round", as_index=False).last()
    figure = Figure(layout="constrained")
    ax = figure.subplots()
    for kind, marker, shift in (("private", "o", -0.1), ("proxy", "s", 0.1)):
        points = by_round[["round", kind]].explode(kind)
        ax.scatter(points["round"] + shift, points[kind], marker=marker, label=kind)
    ax.axhline(by_round["label"].iloc[0], linestyle=":", color="gray", label="true label")
    ax.set(xlabel="round", ylabel="label in the set", title="Prediction sets of one sample")
    ax.legend()
    write(figure, by_round[["round", "label", "private", "proxy"]], out / "sets")
    shown = rows[rows["round"] == min(ROUND, rows["round"].max())]
    epochs = shown.groupby("epoch", as_index=False)[["accuracy", "proxy_set"]].mean()
    epochs.to_csv(out / "epochs.csv", index=False)
    print(epochs.to_string(index=False))


def draw_features(size: str, seed: int, out: Path) -> None:
    """Draw the t-SNE of test samples' features in the best client's model with TA, EN, and both."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    numbers = []
    for ax, row in zip(figure.subplots(1, 3), ("TA", "EN", "EN + TA"), strict=True):
        values = values_of("um-pfssl-3", row, "FMNIST or digits, α = 5", size, seed)
        result = made(out / f"features-{row.replace(' + ', '-')}", values)
        best = str(result.clients["accuracy.personal.private"].idxmax())
        x, y, _ = result.test()
        with torch.no_grad():
            features, logits = result.model(best).features_and_logits(x)
        points = TSNE(random_state=seed).fit_transform(features.numpy())
        ax.scatter(*points.T, c=y, cmap="tab10", s=4)
        ax.set(title=f"{row}: {best}", xticks=[], yticks=[])
        accuracy = float((logits.argmax(1).numpy() == y).mean())
        numbers.append({"relation": row, "client": best, "accuracy": accuracy, "samples": len(y)})
    write(figure, pd.DataFrame(numbers), out / "features")


def draw_confusion(size: str, seed: int, out: Path) -> None:
    """Draw the confusion matrices of UM-pFSSL and of the mixed methods on all clients' tests."""
    tables = {"um-pfssl-6": "PathMNIST", "um-pfssl-7": "OrganMNIST"}
    if size == "tiny":
        tables = {"um-pfssl-1": "digits"}
    figure = Figure(figsize=(12, 6 * len(tables)), layout="constrained")
    grid, numbers = figure.subplots(len(tables), 2, squeeze=False), []
    for axes, (table, data) in zip(grid, tables.items(), strict=True):
        results = {
            row: made(out / f"{table}-{row}", values_of(table, row, "α = 0.5", size, seed))
            for row in ("UM-pFSSL", *MIX)
        }
        labels, predictions = [], {"UM-pFSSL": [], "Mix": []}
        for client in results["UM-pFSSL"].clients.index:
            x, y, classes = results["UM-pFSSL"].test(client)
            predicted = {
                row: each.predict(client, x, kind="global" if row in MIX else "private")
                for row, each in results.items()
            }
            labels.append(y)
            predictions["UM-pFSSL"].append(predicted["UM-pFSSL"].labels)
            mixed = np.mean([predicted[row].probabilities for row in MIX], axis=0)
            predictions["Mix"].append(mixed.argmax(1))
        for ax, (name, each) in zip(axes, predictions.items(), strict=True):
            truth, guessed = np.concatenate(labels), np.concatenate(each)
            known = range(len(classes))
            shares = confusion_matrix(truth, guessed, labels=known, normalize="true")
            shown = ConfusionMatrixDisplay(shares, display_labels=classes)
            shown.plot(ax=ax, values_format=".2f", colorbar=False, xticks_rotation=90)
            ax.set_title(f"{data} + {name}")
            recalls = np.diag(shares)[np.isin(known, truth)]
            numbers += [
                {"data": data, "method": name, "class": classes[k], "accuracy": recall}
                for k, recall in zip(np.unique(truth), recalls, strict=True)
            ]
    write(figure, pd.DataFrame(numbers), out / "confusion")


FIGURES = {"sets": draw_sets, "features": draw_features, "confusion": draw_confusion}


def main() -> None:
    """Parse the arguments, and draw a figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("--size", choices=("tiny", "small", "paper"), default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/figures"))
    chosen = parser.parse_args()
    FIGURES[chosen.figure](chosen.size, chosen.seed, chosen.out / chosen.size)


if __name__ == "__main__":
    main()
