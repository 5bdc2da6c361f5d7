"""Time of a client's training loop, relative to a plain PyTorch loop with a DataLoader.

    python -m benchmarks.training_loop [--pairs 7] [--device cpu] [--ag-news FILE]

Image models are trained on digits, and `text-cnn` on synthetic texts or on rows of AG News in FILE.
Bound: 1.0 for the loop with cross-entropy. Felo, which also trains on two distillation terms and
gathers class means, is compared with the same plain cross-entropy loop.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.timing import open_client, ratios, show
from fedhet.cli.example import write_example
from fedhet.clients.base import HetClient
from fedhet.config.resolve import resolve
from fedhet.models import build
from fedhet.wire.knowledge import Knowledge

DIGITS = ("mlp", "cnn2", "cnn3", "resnet10")


def open_new(
    method: str, model: str, device: str, directory: Path, data: Mapping[str, object]
) -> HetClient:
    """Return a client of `method` that has all training data, with new models."""
    config = resolve(
        {
            "method": method,
            "clients": 1,
            "data.partition": "iid",
            "models.pool": model,
            "training.local-epochs": 3,
            "engine.device": device,
            **data,
        }
    )
    return open_client(config, directory / method / model)


def our_epochs(client: HetClient, knowledge: Knowledge) -> Callable[[], object]:
    """Return a function that trains the client for one round."""
    client.state.metadata["participations"] = 1
    return lambda: client.train(2, knowledge)


def plain_epochs(client: HetClient, model_name: str) -> Callable[[], object]:
    """Return a function that trains for the same epochs in a plain PyTorch loop."""
    device = client.compute.device
    model = build(model_name, client.info.shape, client.info.classes, seed=0).to(device)
    data = TensorDataset(client.x.cpu(), client.y.cpu())
    loader = DataLoader(data, batch_size=client.run.training.batch_size, shuffle=True)

    def train() -> None:
        optimizer = torch.optim.Adam(model.parameters(), lr=client.run.training.lr)
        model.train()
        for _ in range(client.run.training.local_epochs):
            total = 0.0
            for x, y in loader:
                x, y = x.to(device), y.to(device)
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item() * len(y)

    return train


def teaching(client: HetClient) -> Knowledge:
    """Return the knowledge that Felo's server would send after the client has trained once."""
    answer = client.train(1, Knowledge())
    return Knowledge({n: answer.tensors[n] for n in ("classes", "features", "logits")})


def texts_in(folder: Path, ag_news: str | None) -> dict[str, object]:
    """Return the data settings for AG News, or for synthetic texts written to `folder`."""
    if ag_news:
        columns = {"data.label-column": "1", "data.text-column": ["2", "3"]}
        return {"data.dataset": f"text:{ag_news}", "data.max-samples": 7600, **columns}
    write_example("text", folder / "texts")
    return {"data.dataset": f"text:{folder / 'texts'}"}


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ag-news", help="AG News as published, without a header: .csv or .csv.gz")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        texts = texts_in(Path(folder), chosen.ag_news)
        for model, data in [*((model, {}) for model in DIGITS), ("text-cnn", texts)]:
            local = open_new("local", model, chosen.device, Path(folder), data)
            plain = plain_epochs(local, model)
            values = ratios(our_epochs(local, Knowledge()), plain, chosen.pairs)
            show(f"cross-entropy, {model} / plain loop", values, 1.0)
            felo = open_new("felo", model, chosen.device, Path(folder), data)
            values = ratios(our_epochs(felo, teaching(felo)), plain, chosen.pairs)
            show(f"felo, {model} / plain loop", values)


if __name__ == "__main__":
    main()
