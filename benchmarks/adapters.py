"""Memory of a process by number of clients with adapters, and memory and step time like peft's.

    FEDHET_ENCODERS=bases python -m benchmarks.adapters minilm [--clients 10] [--tokens 64]
    FEDHET_ENCODERS=bases python -m benchmarks.adapters news --causal

The clients have the ranks 2, 4, 8, 16, and 32 in turn, and each makes one training step with Adam.
The step time is the CPU time for 16 texts at rank 8. With `--causal`, each token of a text is
predicted. Bounds: 1.3 times the memory of one client, and 1.1 times the memory and the step time of
peft.
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
from fedhet.tasks import CausalLanguageModeling

RANKS, CLASSES = (2, 4, 8, 16, 32), 4


def batch(vocabulary: int, tokens: int, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return random tokens [16, `tokens`], and labels [16] or the next tokens [16, `tokens`]."""
    draws = torch.Generator().manual_seed(0)
    x = torch.randint(1, vocabulary, (16, tokens), generator=draws)
    return x, x.roll(-1, 1) if causal else torch.randint(CLASSES, (16,), generator=draws)


def step_of(
    loss_of: Callable[[Tensor, Tensor], Tensor],
    parameters: list[nn.Parameter],
    x: Tensor,
    y: Tensor,
) -> Callable[[], None]:
    """Return a function that makes one training step."""
    optimizer = torch.optim.Adam(parameters, 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(x, y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def client(base: str, rank: int, tokens: int, causal: bool) -> Callable[[], None]:
    """Return a function that makes one training step of a new client."""
    vocabulary = int(configuration(base)["vocab_size"])
    name = f"{'causal' if causal else 'encoder-1'}-lora{rank}:{base}"
    model = models.build(name, (0, tokens, vocabulary + 1), CLASSES, seed=0).train()
    loss = CausalLanguageModeling().loss() if causal else F.cross_entropy
    samples = batch(vocabulary, tokens, causal=causal)
    return step_of(lambda x, y: loss(model(x), y), list(model.parameters()), *samples)


def megabytes(base: str, clients: int, tokens: int, causal: bool) -> float:
    """Return the resident memory of this process after one step of each client, in MB.

    If there are 0 clients, the step is peft's.
    """
    torch.set_num_threads(1)
    ranks = [RANKS[number % len(RANKS)] for number in range(clients)]
    steps = [client(base, rank, tokens, causal) for rank in ranks]
    for step in steps or [peft_step(base, RANKS[0], tokens, causal)]:
        step()
    return float(psutil.Process().memory_info().rss / 1e6)


def peft_step(base: str, rank: int, tokens: int, causal: bool) -> Callable[[], None]:
    """Return a training step of the same model in peft.

    An encoder has a linear head on its mean features, and a causal model its own head and loss.
    """
    import peft
    import transformers

    auto = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    network = auto.from_pretrained(encoder_directory(base), use_safetensors=True)
    targets = ["q_proj", "v_proj"] if causal else ["query", "value"]
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)
    adapted = peft.get_peft_model(network, config).eval()
    head = nn.Linear(network.config.hidden_size, CLASSES)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        mask = torch.ones_like(x)
        if causal:
            loss: Tensor = adapted(input_ids=x, attention_mask=mask, labels=x).loss
            return loss
        states = adapted(input_ids=x, attention_mask=mask).last_hidden_state
        return F.cross_entropy(head(states.mean(1)), y)

    trained = [each for each in (*adapted.parameters(), *head.parameters()) if each.requires_grad]
    samples = batch(network.config.vocab_size, tokens, causal=causal)
    return step_of(loss_of, trained, *samples)


def main() -> None:
    """Print the ratios of memory use and the ratio of step times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", help="directory of a BERT- or Llama-like model in $FEDHET_ENCODERS")
    parser.add_argument("--causal", action="store_true", help="predict each token of a text")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=9)
    chosen = parser.parse_args()
    base, tokens, causal = chosen.base, chosen.tokens, chosen.causal
    theirs_alone, one, many = (
        apart(megabytes, base, count, tokens, causal) for count in (0, 1, chosen.clients)
    )
    print(
        f"memory of {chosen.clients} clients / 1: {many / one:.2f} ({many:.0f} MB, {one:.0f} MB)  "
        f"bound 1.30 {verdict(many <= 1.3 * one)}\n"
        f"memory of a client / peft's: {one / theirs_alone:.2f} ({one:.0f} MB, "
        f"{theirs_alone:.0f} MB)  bound 1.10 {verdict(one <= 1.1 * theirs_alone)}"
    )
    torch.set_num_threads(1)
    ours, theirs = (make(base, 8, tokens, causal) for make in (client, peft_step))
    show("step / peft's step", ratios(ours, theirs, chosen.runs, time.process_time), 1.1)


if __name__ == "__main__":
    main()
