"""Trains a score function on a CPU: which distances does a sequence depend on?

Each token of a made-up language repeats one of the tokens 3, 11 and 29 positions before it, or is random. A layer of
attention learns the three distances. Its only parameters are a relative bias, a temperature of each head and the
embeddings. The bias is a tensor that the score function captures: its gradient is computed in the kernels, tile by
tile.

    python examples/train_learned_bias.py --plot bias.png
"""

import argparse
import math
import time

import torch
from torch import Tensor, nn

from flash_attn_ext import flex_attention
from flash_attn_ext.flex.create import create_block_mask

DISTANCES, TOKENS, LENGTH, FARTHEST = (3, 11, 29), 64, 256, 48


def sequences(batch: int) -> Tensor:
    """Tokens (batch, LENGTH). Each repeats one of the DISTANCES with probability 0.3, 0.3 and 0.2."""
    tokens = torch.randint(TOKENS, (batch, LENGTH))
    chosen = torch.multinomial(torch.tensor([0.3, 0.3, 0.2, 0.2]), batch * LENGTH, replacement=True).view(batch, LENGTH)
    for i in range(LENGTH):
        for n, distance in enumerate(DISTANCES):
            if i >= distance:
                tokens[:, i] = torch.where(chosen[:, i] == n, tokens[:, i - distance], tokens[:, i])
    return tokens


class Model(nn.Module):
    """Attention to earlier tokens by distance alone, and the log of the mixture of their embeddings."""

    def __init__(self, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.bias = nn.Parameter(0.01 * torch.randn(heads, FARTHEST))
        self.log_temperature = nn.Parameter(torch.zeros(heads))
        self.share = nn.Parameter(torch.zeros(heads + 1))  # of each head, and of a random token
        self.mask = create_block_mask(
            lambda b, h, q_idx, kv_idx: (q_idx > kv_idx) & (q_idx - kv_idx < FARTHEST), None, None, LENGTH, LENGTH
        )

    def score_mod(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (score + self.bias[h, q_idx - kv_idx]) * torch.exp(self.log_temperature[h])

    def forward(self, tokens: Tensor) -> Tensor:
        """The log probabilities of each token, given the tokens before it."""
        values = nn.functional.one_hot(tokens, TOKENS).float()[:, None].expand(-1, self.heads, -1, -1)
        nothing = values.new_zeros(*values.shape[:-1], 1)  # query and key: scores are 0 before the function
        repeated = flex_attention(nothing, nothing, values, self.score_mod, self.mask)
        share = self.share.softmax(0)
        mixture = torch.einsum("h,bhst->bst", share[:-1], repeated) + share[-1] / TOKENS
        return torch.log(mixture)


def train(steps: int, *, seed: int = 0) -> tuple[Model, list[float]]:
    torch.manual_seed(seed)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        tokens = sequences(8)
        loss = nn.functional.nll_loss(model(tokens)[:, FARTHEST:].flatten(0, 1), tokens[:, FARTHEST:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {loss.item():.3f}")
    return model, losses


def best_loss() -> float:
    """The entropy of a token, given the tokens before it, if the three are different."""
    shares = [0.3, 0.3, 0.2]
    random = 0.2 / TOKENS
    repeated = -sum((p + random) * math.log(p + random) for p in shares)
    return repeated - (TOKENS - 3) * random * math.log(random)


def plot(model: Model, losses: list[float], path: str) -> None:
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    left.plot(losses, color="tab:blue", label="loss")
    left.axhline(best_loss(), color="black", linestyle=":", label="entropy if the three tokens differ")
    left.set(xlabel="step", ylabel="nats per token")
    left.legend()
    learned = (model.bias * model.log_temperature.exp()[:, None]).detach().softmax(-1)
    for h in range(model.heads):
        right.plot(learned[h], label=f"head {h}")
    right.set(xlabel="distance", ylabel="weight that the head learned")
    right.legend()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--plot", metavar="FILE", help="for a picture, a PNG")
    arguments = parser.parse_args()
    start = time.perf_counter()
    model, losses = train(arguments.steps)
    print(f"{time.perf_counter() - start:.0f} s; {best_loss():.3f} nats are the best if the three tokens always differ")
    for h, distance in enumerate(model.bias.argmax(1).tolist()):
        print(f"head {h} attends {distance} tokens back")
    if arguments.plot:
        plot(model, losses, arguments.plot)


if __name__ == "__main__":
    main()
