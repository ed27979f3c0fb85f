"""MeanFlow on a toy data set of sets of points: one-step generation, trained through the jvp of flash_attn.

    python examples/meanflow.py --plot meanflow.png

Each sample is a set of 64 points in the plane, in five clusters. A small attention network moves all points of a set
together. MeanFlow (Geng et al. 2025, arXiv 2505.13447) trains the average velocity u(z, r, t) between two times,
r and t, by the identity

    u = v - (t - r) du/dt,      du/dt = v grad_z u + d_t u: a jvp of the network in direction (v, 0, 1)

Then one evaluation converts noise z at time 1 to a sample: z - u(z, 0, 1). torch.func.jvp(flash_attn) computes the jvp
without a score matrix. Reverse mode differentiates the loss.
"""

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from flash_attn_ext import flash_attn

POINTS, WIDTH, HEADS, BLOCKS = 64, 64, 4, 2


class Block(nn.Module):
    """One transformer layer in which all tokens see each other, (B, S, width) -> (B, S, width)."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS, attention: Callable[..., Tensor] = flash_attn):
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class AverageVelocity(nn.Module):
    """u(z, r, t): z (batch, points, 2); r, t (batch)."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", 2.0 ** torch.arange(4) * math.pi / 4)
        self.register_buffer("slow", torch.tensor([0.5, 1.0, 2.0]))
        self.point = nn.Linear(2 + 4 * 4, WIDTH)
        self.time = nn.Sequential(nn.Linear(4 * 3, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.velocity = nn.Linear(WIDTH, 2)

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        times = self.waves(torch.stack([t, t - r], -1), self.slow)
        x = self.point(torch.cat([z, self.waves(z, self.frequencies)], -1)) + self.time(times)[:, None]
        return self.velocity(self.blocks(x))

    @staticmethod
    def waves(x: Tensor, frequencies: Tensor) -> Tensor:
        angles = (x[..., None] * frequencies).flatten(-2)
        return torch.cat([angles.sin(), angles.cos()], -1)


def samples(batch: int) -> Tensor:
    """Points of five clusters on a circle: (batch, points, 2)."""
    angle = torch.randint(5, (batch, POINTS)) * (2 * math.pi / 5)
    return 1.3 * torch.stack([angle.cos(), angle.sin()], -1) + 0.1 * torch.randn(batch, POINTS, 2)


def loss_of(network: Callable[[Tensor, Tensor, Tensor], Tensor], data: Tensor) -> Tensor:
    """The MeanFlow loss of network(z, r, t) on data (batch, tokens, columns)."""
    batch = len(data)
    noise = torch.randn_like(data)
    t, r = torch.rand(2, batch).sort(0, descending=True).values
    r = torch.where(torch.rand(batch) < 0.5, t, r)  # half of the samples are plain flow matching, as in the paper
    z = (1 - t)[:, None, None] * data + t[:, None, None] * noise
    v = noise - data
    u, du_dt = torch.func.jvp(network, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
    target = v - (t - r)[:, None, None] * du_dt
    error = (u - target.detach()).square().mean((1, 2))
    return (error / (error.detach() + 1e-2)).mean()  # the paper's adaptive weight, p = 1


def distance(a: Tensor, b: Tensor) -> float:
    """Mean energy distance between sets of points, a fair pair by pair comparison of distributions in the plane."""
    a, b = a.flatten(0, 1)[:4096], b.flatten(0, 1)[:4096]
    between, within_a, within_b = (torch.cdist(x, y).mean() for x, y in ((a, b), (a, a), (b, b)))
    return (2 * between - within_a - within_b).item()


def train(steps: int, batch: int) -> AverageVelocity:
    network = AverageVelocity()
    optimizer = torch.optim.AdamW(network.parameters(), lr=4e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(network, samples(batch))
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss.item():.3f}  CPU time {time.process_time():.0f} s", flush=True)
    return network


@torch.no_grad()
def generate(network: AverageVelocity, count: int) -> tuple[Tensor, Tensor]:
    """Returns noise, and the sets of points that one evaluation makes of it."""
    noise = torch.randn(count, POINTS, 2)
    return noise, noise - network(noise, torch.zeros(count), torch.ones(count))


def plot(noise: Tensor, made: Tensor, real: Tensor, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 5, figsize=(10, 6.2), sharex=True, sharey=True, layout="constrained")
    for row, (name, sets) in zip(axes, (("data", real), ("noise", noise), ("made in one step", made)), strict=True):
        row[0].set_ylabel(name)
        for axis, points in zip(row, sets, strict=False):
            axis.scatter(*points.T, s=5)
            axis.set_aspect("equal")
            axis.set_xlim(-2.6, 2.6)
            axis.set_ylim(-2.6, 2.6)
    figure.suptitle("MeanFlow through the jvp of flash_attn: sets of 64 points")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="for the figure, a PNG")
    args = parser.parse_args()
    torch.manual_seed(0)
    network = train(args.steps, args.batch)
    real, (noise, made) = samples(64), generate(network, 64)
    print(f"Energy distance to the data: noise {distance(noise, real):.4f}, made in one step "
          f"{distance(made, real):.4f}, other data {distance(samples(64), real):.4f}")  # fmt: skip
    if args.plot:
        plot(noise, made, real, args.plot)


if __name__ == "__main__":
    main()
