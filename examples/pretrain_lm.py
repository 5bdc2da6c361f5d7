"""Pretrain a small causal language model and its tokenizer on half of the topics of a table.

    python examples/pretrain_lm.py data/ag_news.csv data/ag_news-by-topic bases/news

The first argument is a CSV file without a header, whose columns are a topic and one or several
texts, such as train.csv or test.csv of AG News. The script writes two directories:

- The second argument contains train.csv and test.csv for the federation, with the columns topic and
  text. They have every third row of the first argument; one of ten of these rows is in test.csv.
- The third argument is the base model, a Llama with four layers. It is trained on the other rows of
  the first half of the topics. FEDHET_ENCODERS=bases makes it available as causal-lora8:news.
"""

import csv
import gzip
import math
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY, WINDOW, EPOCHS, BATCH, LR = 2048, 64, 6, 32, 3e-3
END = "<|end|>"


def rows_of(path):
    """Return the topic and the text of each row."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8", newline="") as file:
        return [(topic, " ".join(texts)) for topic, *texts in csv.reader(file)]


def write(rows, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("topic", "text"), *rows])


def train_tokenizer(texts):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet,
            show_progress=False,
        ),
    )  # fmt: skip
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def main(source, federation, base):
    rows = rows_of(source)
    topics = sorted({topic for topic, _ in rows})
    federated = rows[::3]
    write([row for number, row in enumerate(federated) if number % 10], federation / "train.csv")
    write(federated[::10], federation / "test.csv")

    known = topics[: len(topics) // 2]
    texts = [text for place, (topic, text) in enumerate(rows) if place % 3 and topic in known]
    tokenizer = train_tokenizer(texts)
    tokens = [token for text in texts for token in [*tokenizer(text).input_ids, 0]]
    windows = torch.tensor(tokens[: len(tokens) // WINDOW * WINDOW]).view(-1, WINDOW)
    held_out, windows = windows[:100], windows[100:]

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=352,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=0,
        )
    ).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), LR, weight_decay=0.05)
    steps = EPOCHS * (len(windows) // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / 50, 0.5 * (1 + math.cos(math.pi * step / steps))),
    )
    for epoch in range(EPOCHS):
        network.train()
        for batch in windows[torch.randperm(len(windows))].split(BATCH):
            if len(batch) < BATCH:
                continue
            ids = batch.to(device)
            loss = network(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        network.eval()
        with torch.no_grad():
            loss = network(input_ids=held_out.to(device), labels=held_out.to(device)).loss
        print(f"epoch {epoch + 1}: perplexity {loss.exp().item():.1f} on held-out texts")
    network.save_pretrained(base)
    tokenizer.save_pretrained(base)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
