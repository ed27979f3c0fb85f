"""MeanFlow on images of digits: one evaluation of a network makes an image, and the jvp of flash_attn trains it.

    pip install scikit-learn                                            # it has the 1797 images of 8 x 8 pixels
    python examples/meanflow_digits.py --plot meanflow_digits.png

A token is a patch of 2 x 2 pixels. A transformer, told the digit, gives the average velocity of all patches between
two times. The loss is the loss of meanflow.py (Geng et al. 2025, arXiv 2505.13447). Ctrl-C ends the training early, and
the figure shows the network's digits at that time.

A nearest-neighbour classifier judges the images: it knows the real images only, and should read the digit that was
asked for. The distance to the nearest real image says whether images are real ones learned by heart.
"""

import argparse
import sys
import time
from copy import deepcopy
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from interruption import catch_interruption
from meanflow import AverageVelocity, Block, loss_of
from torch import Tensor, nn

SIDE, PATCH, DIGITS = 8, 2, 10
TOKENS, COLUMNS = (SIDE // PATCH) ** 2, PATCH**2
WIDTH, HEADS, BLOCKS = 64, 4, 3
AVERAGE = 0.997  # of the weights, per step


class DigitVelocity(nn.Module):
    """u(z, r, t | digit): z (batch, TOKENS, COLUMNS); r, t (batch); digit (batch)."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Linear(COLUMNS, WIDTH)
        self.place = nn.Parameter(0.1 * torch.randn(TOKENS, WIDTH))
        self.digit = nn.Embedding(DIGITS, WIDTH)
        self.register_buffer("frequencies", torch.tensor([0.5, 1.0, 2.0, 4.0]))
        self.time = nn.Sequential(nn.Linear(16, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(BLOCKS)))
        self.velocity = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, COLUMNS))

    def forward(self, z: Tensor, r: Tensor, t: Tensor, digit: Tensor) -> Tensor:
        times = AverageVelocity.waves(torch.stack([t, t - r], -1), self.frequencies)
        condition = self.time(times) + self.digit(digit)
        return self.velocity(self.blocks(self.patch(z) + self.place + condition[:, None]))


def real_images() -> tuple[Tensor, Tensor]:
    """Images (1797, SIDE, SIDE) with values from -1 to 1, and their digits (1797)."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32) / 8 - 1, torch.tensor(data.target)


def as_tokens(images: Tensor) -> Tensor:
    """(batch, SIDE, SIDE) -> (batch, TOKENS, COLUMNS)."""
    patches = images.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)
    return patches.reshape(len(images), TOKENS, COLUMNS)


def as_images(tokens: Tensor) -> Tensor:
    """The inverse of as_tokens."""
    side = SIDE // PATCH
    return tokens.reshape(-1, side, side, PATCH, PATCH).transpose(2, 3).reshape(-1, SIDE, SIDE)


def train(images: Tensor, digits: Tensor, minutes: float, batch: int) -> nn.Module:
    """Trains for this CPU time, and returns the network with the running average of the weights."""
    network = DigitVelocity()
    averaged = deepcopy(network)
    print(f"{sum(p.numel() for p in network.parameters()):,} parameters, {len(images)} images")
    optimizer = torch.optim.AdamW(network.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.01)
    tokens, start, step, seconds = as_tokens(images), time.process_time(), 0, 0.0
    with catch_interruption() as interrupted:
        while seconds < 60 * minutes and not interrupted():
            part = seconds / (60 * minutes)
            optimizer.param_groups[0]["lr"] = 4e-3 * min(1, (step + 1) / 100, 2 * (1 - part))
            chosen = torch.randint(len(images), (batch,))
            loss = loss_of(partial(network, digit=digits[chosen]), tokens[chosen])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            with torch.no_grad():
                for average, weight in zip(averaged.parameters(), network.parameters(), strict=True):
                    average.lerp_(weight, 1 - min(AVERAGE, step / (step + 10)))
            step, seconds = step + 1, time.process_time() - start
            if step % 200 == 0:
                print(f"step {step:5d}  loss {loss.item():.3f}  CPU time {seconds:.0f} s", flush=True)
    return averaged


@torch.no_grad()
def make(network: nn.Module, digits: Tensor, evaluations: int = 1) -> Tensor:
    """Images of the digits (batch), from noise at time 1 to time 0 in equal steps."""
    z = torch.randn(len(digits), TOKENS, COLUMNS)
    times = torch.linspace(1, 0, evaluations + 1)
    for t, r in pairwise(times):
        z = z - (t - r) * network(z, r.expand(len(z)), t.expand(len(z)), digits)
    return as_images(z)


def judge(made: Tensor, digits: Tensor, images: Tensor, real_digits: Tensor) -> tuple[float, float]:
    """The share of images that the nearest real image calls the right digit, and the mean distance to that image."""
    distance, nearest = torch.cdist(made.flatten(1), images.flatten(1)).min(1)
    return (real_digits[nearest] == digits).float().mean().item(), distance.mean().item()


def plot(rows: dict[str, Tensor], path: Path) -> None:
    """Draws rows of images, (n, SIDE, SIDE) each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = max(map(len, rows.values()))
    figure, axes = pyplot.subplots(len(rows), columns, figsize=(columns * 0.6, len(rows) * 0.75), layout="constrained")
    for row, (name, images) in zip(axes, rows.items(), strict=True):
        row[0].set_ylabel(name, rotation=0, ha="right", va="center")
        for axis, image in zip(row, images, strict=True):
            axis.imshow(image, cmap="gray_r", vmin=-1, vmax=1)
            axis.set(xticks=[], yticks=[])
    figure.suptitle("MeanFlow: one evaluation of the network makes an image")
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4, help="CPU time of the training (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=128, help="images in a step (default: %(default)s)")
    parser.add_argument("--count", type=int, default=1000, help="images to make and judge (default: %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="for the figure, a PNG")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    try:
        images, digits = real_images()
    except ImportError:
        sys.exit("meanflow_digits.py: the images are in scikit-learn, which is not installed: pip install scikit-learn")
    network = train(images, digits, args.minutes, args.batch)

    asked = torch.arange(args.count) % DIGITS
    for evaluations in (1, 2, 8):
        right, distance = judge(make(network, asked, evaluations), asked, images, digits)
        print(f"{evaluations} evaluations: {right:.1%} read as the digit, distance to the nearest image {distance:.2f}")
    right, distance = judge(images[::2], digits[::2], images[1::2], digits[1::2])
    print(f"real images, half against half: {right:.1%}, {distance:.2f}")
    if args.plot:
        first = torch.stack([images[digits == digit][0] for digit in range(DIGITS)])
        made = {f"made ({i})": make(network, torch.arange(DIGITS)) for i in range(1, 5)}
        plot({"real": first, "noise": torch.randn(DIGITS, SIDE, SIDE)} | made, args.plot)


if __name__ == "__main__":
    main()
