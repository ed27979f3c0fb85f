"""A WGAN-GP with attention in its critic: the gradient penalty is differentiated twice through flash_attn.

    python examples/wgan_gp.py --plot wgan_gp.png
    python examples/wgan_gp.py --steps 0 --compare 64 256 1024

The critic c of Gulrajani et al. 2017 (arXiv 1704.00028) minimises

    mean c(made) - mean c(real) + 10 mean (|grad_x c(x)| - 1)^2,      x between a made and a real set

The gradient of the last term is a second derivative of the critic. torch's fused attention on CPU has none. Its math
kernel has one, and stores matrices of S x S for it.

A sample is a set of 64 points in the plane, in five clusters, as in examples/meanflow.py. The critic attends from each
point to all points of the set. Ctrl-C ends the training early, and the figure is drawn.

With --compare the program measures one critic step through flash_attn and through torch's math kernel. It prints the
median CPU time of alternating steps, and the peak memory of a process for each kernel.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from gpt_model import attention_by_name
from interruption import steps_until_interruption
from meanflow import BLOCKS, POINTS, WIDTH, AverageVelocity, Block, distance, samples
from torch import Tensor, nn
from training_process import TrainingProcess, memory_in_use, peak_memory

from flash_attn_ext import flash_attn

FREQUENCIES = 2.0 ** torch.arange(4) * math.pi / 4
CRITIC_STEPS, PENALTY = 3, 10.0
MIB = 2**20


class Critic(nn.Module):
    """A number for each set: points (B, S, 2) -> (B)."""

    def __init__(self, attention: Callable[..., Tensor] = flash_attn):
        super().__init__()
        self.register_buffer("frequencies", FREQUENCIES)
        self.point = nn.Linear(2 + 4 * len(FREQUENCIES), WIDTH)
        self.blocks = nn.Sequential(*(Block(attention=attention) for _ in range(BLOCKS)))
        self.score = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        features = torch.cat([x, AverageVelocity.waves(x, self.frequencies)], -1)
        return self.score(self.blocks(self.point(features))).mean((1, 2))


class Generator(nn.Module):
    """Moves noise points (B, S, 2) together."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", FREQUENCIES)
        self.point = nn.Linear(2 + 4 * len(FREQUENCIES), WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.move = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2))

    def forward(self, noise: Tensor) -> Tensor:
        features = torch.cat([noise, AverageVelocity.waves(noise, self.frequencies)], -1)
        return noise + self.move(self.blocks(self.point(features)))


def penalty(critic: Critic, real: Tensor, made: Tensor) -> Tensor:
    """Mean of (|grad_x c(x)| - 1)^2 at random points x between made and real sets."""
    x = torch.lerp(made, real, torch.rand(len(real), 1, 1, dtype=real.dtype)).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return (gradient.flatten(1).norm(dim=1) - 1).square().mean()


def critic_step(critic: Critic, optimizer, real: Tensor, made: Tensor) -> tuple[float, float]:
    """Runs one optimiser step. Returns the estimated Wasserstein distance, and the penalty without its factor."""
    distance = critic(real).mean() - critic(made).mean()
    smooth = penalty(critic, real, made)
    optimizer.zero_grad()
    (PENALTY * smooth - distance).backward()
    optimizer.step()
    return distance.item(), smooth.item()


def train(steps: int, batch: int) -> tuple[Generator, list[float]]:
    """Returns the generator, and the distance after each step."""
    critic, generator = Critic(), Generator()
    critic_optimizer, optimizer = (
        torch.optim.Adam(network.parameters(), lr=rate, betas=(0.0, 0.9))
        for network, rate in ((critic, 1e-3), (generator, 1e-3))
    )
    distances = []
    for step in steps_until_interruption(steps):
        for _ in range(CRITIC_STEPS):
            with torch.no_grad():
                made = generator(torch.randn(batch, POINTS, 2))
            estimate, smooth = critic_step(critic, critic_optimizer, samples(batch), made)
        loss = -critic(generator(torch.randn(batch, POINTS, 2))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        distances.append(estimate)
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:5d}  critic's distance {estimate:.3f}  penalty {smooth:.4f}  "
                  f"CPU time {time.process_time():.0f} s", flush=True)  # fmt: skip
    return generator, distances


class MeasuredStep:
    """A critic step on random sets of many points, for a process that measures it alone."""

    def __init__(self, attention: str, points: int, batch: int):
        self.start = memory_in_use("cpu")
        torch.manual_seed(0)
        self.critic = Critic(attention_by_name(attention))
        self.optimizer = torch.optim.Adam(self.critic.parameters())
        self.real, self.made = torch.randn(2, batch, points, 2)

    def step(self) -> tuple[float, float, int]:
        """Returns the CPU seconds, the penalty, and the peak memory without the memory before the model, in bytes."""
        torch.manual_seed(1)
        start = time.process_time()
        _, smooth = critic_step(self.critic, self.optimizer, self.real, self.made)
        return time.process_time() - start, smooth, peak_memory("cpu") - self.start


def compare(lengths: list[int], batch: int, rounds: int) -> list[tuple[int, float, float, float]]:
    """Prints and returns, for each number of points, the ratio of the times and the MiB of ours and of torch."""
    rows = []
    for points in lengths:
        with ExitStack() as stack:
            processes = [stack.enter_context(closing(TrainingProcess(MeasuredStep, name, points, batch)))
                         for name in ("flash_attn_ext", "sdpa-math")]  # fmt: skip
            results = [[process.call("step") for process in processes] for _ in range(rounds)]
        ratio = statistics.median(torchs[0] / ours[0] for ours, torchs in results[1:])
        ours, torchs = results[-1]
        rows.append((points, ratio, ours[2] / MIB, torchs[2] / MIB))
        print(f"{points} points, batch {batch}: torch's CPU time / ours {ratio:.2f}; {ours[0] * 1e3:.0f} ms and "
              f"{ours[2] / MIB:.0f} MiB, torch {torchs[2] / MIB:.0f} MiB; "
              f"penalties after {rounds} steps {ours[1]:.5f} and {torchs[1]:.5f}", flush=True)  # fmt: skip
    return rows


def plot(generator: Generator, distances: list[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    noise = torch.randn(4, POINTS, 2)
    with torch.no_grad():
        made = generator(noise)
    figure, axes = pyplot.subplots(1, 4, figsize=(12, 3), layout="constrained")
    for axis, (name, sets) in zip(axes, (("data", samples(4)), ("noise", noise), ("generated", made)), strict=False):
        for points in sets:
            axis.scatter(*points.T, s=5)
        axis.set(title=f"four sets: {name}", xlim=(-2.6, 2.6), ylim=(-2.6, 2.6), aspect="equal")
    axes[3].plot(distances, lw=0.8)
    axes[3].set(title="the critic's distance", xlabel="step of the generator")
    figure.suptitle("WGAN-GP with attention in the critic, by double backward of flash_attn")
    figure.savefig(path, dpi=100)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps of the generator (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="for the figure, a PNG")
    parser.add_argument("--compare", type=int, nargs="*", default=[], metavar="POINTS", help="numbers of points")
    parser.add_argument("--rounds", type=int, default=7, help="steps of each comparison (default: %(default)s)")
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    if arguments.steps:
        generator, distances = train(arguments.steps, arguments.batch)
        noise = torch.randn(64, POINTS, 2)
        with torch.no_grad():
            made = generator(noise)
        print(f"Energy distance to the data: noise {distance(noise, samples(64)):.4f}, generated "
              f"{distance(made, samples(64)):.4f}, other data {distance(samples(64), samples(64)):.4f}")  # fmt: skip
        if arguments.plot:
            plot(generator, distances, arguments.plot)
    compare(arguments.compare, 4, arguments.rounds)


if __name__ == "__main__":
    main()
