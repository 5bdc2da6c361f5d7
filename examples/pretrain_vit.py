"""Pretrain a small vision transformer on half of the classes of an image folder.

    python examples/pretrain_vit.py data/cifar10 data/cifar10-ten bases/vit-cifar5

The first argument contains train/CLASS/IMAGE and test/CLASS/IMAGE, e.g. all images of CIFAR-10. The
script writes two directories:

- The second argument is an image folder for the federation. It contains hard links to the last
  1,000 training images and the first 200 test images of each class.
- The third argument is the base model. It is trained on the other training images of the first half
  of the classes. FEDHET_ENCODERS=bases makes it available as encoder-1-lora8:vit-cifar5.
"""

import math
import os
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F
from transformers import ViTConfig, ViTModel

EPOCHS, BATCH, LR, WEIGHT_DECAY = 40, 256, 1e-3, 0.05


def read(files):
    """Read images as uint8 [N, 3, 32, 32]."""
    arrays = [np.asarray(Image.open(file).convert("RGB")) for file in files]
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)


def as_inputs(x):
    return x.float() / 127.5 - 1


def crop_and_flip(x):
    """Shift each image by up to 4 pixels, and mirror it with probability 0.5."""
    padded = F.pad(x, (4, 4, 4, 4))
    rows, columns = torch.randint(0, 9, (2, len(x)), device=x.device)
    i = (rows[:, None] + torch.arange(32, device=x.device))[:, None, :, None]
    j = (columns[:, None] + torch.arange(32, device=x.device))[:, None, None, :]
    n = torch.arange(len(x), device=x.device)[:, None, None, None]
    c = torch.arange(3, device=x.device)[None, :, None, None]
    shifted = padded[n, c, i, j]
    is_mirrored = torch.rand(len(x), device=x.device)[:, None, None, None] < 0.5
    return torch.where(is_mirrored, shifted.flip(3), shifted)


def main(source, federation, base):
    classes = sorted(path.name for path in (source / "train").iterdir())
    first_half = classes[: len(classes) // 2]

    for name in classes:
        train = sorted((source / "train" / name).iterdir())[-1000:]
        test = sorted((source / "test" / name).iterdir())[:200]
        for part, files in (("train", train), ("test", test)):
            directory = federation / part / name
            directory.mkdir(parents=True)
            for file in files:
                os.link(file, directory / file.name)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    train = [sorted((source / "train" / name).iterdir())[:-1000] for name in first_half]
    test = [sorted((source / "test" / name).iterdir())[:200] for name in first_half]
    x, test_x = (torch.cat([read(each) for each in part]).to(device) for part in (train, test))
    y, test_y = (
        torch.cat([torch.full((len(each),), label) for label, each in enumerate(part)]).to(device)
        for part in (train, test)
    )

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=3,
        intermediate_size=768,
        image_size=32,
        patch_size=4,
    )
    network = ViTModel(config, add_pooling_layer=False).to(device)
    head = torch.nn.Linear(192, len(first_half)).to(device)
    parameters = [*network.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, LR, weight_decay=WEIGHT_DECAY)
    steps = EPOCHS * (len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(step / 200, 0.5 * (1 + math.cos(math.pi * step / steps))),
    )

    def logits(images):
        with torch.autocast(device, torch.bfloat16):
            return head(network(pixel_values=as_inputs(images)).last_hidden_state[:, 0])

    for epoch in range(EPOCHS):
        network.train()
        for rows in torch.randperm(len(x), device=device).split(BATCH):
            if len(rows) < BATCH:
                continue
            loss = F.cross_entropy(logits(crop_and_flip(x[rows])).float(), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        if (epoch + 1) % 10 == 0:
            network.eval()
            with torch.no_grad():
                accuracy = (logits(test_x).argmax(1) == test_y).float().mean().item()
            print(f"epoch {epoch + 1}: accuracy {accuracy:.3f} on {len(test_y)} test images")
    network.save_pretrained(base)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
