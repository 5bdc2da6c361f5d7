"""Memory of a process by number of clients with adapters, and step time relative to peft.

    FEDHET_ENCODERS=bases python -m benchmarks.adapters minilm [--clients 10] [--tokens 64]

The clients have the ranks 2, 4, 8, 16, and 32 in turn, and each makes one training step with Adam.
The step time is the CPU time for 16 texts at rank 8. Bounds: 1.3 times the memory of one client,
and 1.1 times the step time of peft.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.timing import apart, ratios, show, verdict
from fedhet import models
from fedhet.data.texts import configuration, encoder_directory

RANKS, CLASSES = (2, 4, 8, 16, 32), 4


def batch(vocabulary: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Return random tokens [16, `tokens`] and labels [16]."""
    draws = torch.Generator().manual_seed(0)
    x = torch.randint(1, vocabulary, (16, tokens), generator=draws)
    return x, torch.randint(CLASSES, (16,), generator=draws)


def step_of(
    logits: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], x: Tensor, y: Tensor
) -> Callable[[], None]:
    """Return a function that makes one training step."""
    optimizer = torch.optim.Adam(parameters, 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(logits(x), y).backward()
        optimizer.step()

    return step


def client(base: str, rank: int, tokens: int) -> Callable[[], None]:
    """Return a function that makes one training step of a new client."""
    vocabulary = int(configuration(base)["vocab_size"])
    name = f"encoder-1-lora{rank}:{base}"
    model = models.build(name, (0, tokens, vocabulary), CLASSES, seed=0).train()
    return step_of(model, list(model.parameters()), *batch(vocabulary, tokens))


def megabytes(base: str, clients: int, tokens: int) -> float:
    """Return the resident memory of this process after one step of each client, in MB."""
    torch.set_num_threads(1)
    steps = [client(base, RANKS[number % len(RANKS)], tokens) for number in range(clients)]
    for step in steps:
        step()
    return float(psutil.Process().memory_info().rss / 1e6)


def peft_step(base: str, rank: int, tokens: int) -> Callable[[], None]:
    """Return a training step of the same model in peft, with a linear head on mean features."""
    import peft
    import transformers

    network = transformers.AutoModel.from_pretrained(encoder_directory(base), use_safetensors=True)
    targets = ["query", "value"]
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)
    adapted = peft.get_peft_model(network, config).eval()
    head = nn.Linear(network.config.hidden_size, CLASSES)

    def logits(x: Tensor) -> Tensor:
        states = adapted(input_ids=x, attention_mask=torch.ones_like(x)).last_hidden_state
        found: Tensor = head(states.mean(1))
        return found

    trained = [each for each in (*adapted.parameters(), *head.parameters()) if each.requires_grad]
    return step_of(logits, trained, *batch(network.config.vocab_size, tokens))


def main() -> None:
    """Print the ratio of memory use and the ratio of step times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", help="directory of a BERT-like model in $FEDHET_ENCODERS")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=9)
    chosen = parser.parse_args()
    one, many = (
        apart(megabytes, chosen.base, count, chosen.tokens) for count in (1, chosen.clients)
    )
    print(
        f"memory of {chosen.clients} clients / 1: {many / one:.2f} ({many:.0f} MB, {one:.0f} MB)  "
        f"bound 1.30 {verdict(many <= 1.3 * one)}"
    )
    torch.set_num_threads(1)
    ours, theirs = (make(chosen.base, 8, chosen.tokens) for make in (client, peft_step))
    show("step / peft's step", ratios(ours, theirs, chosen.runs, time.process_time), 1.1)


if __name__ == "__main__":
    main()
