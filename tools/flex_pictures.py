"""Draws the masks and score functions of docs/flex.md: python tools/flex_pictures.py docs/figures/flex_gallery.png"""

import argparse
from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
from torch import Tensor

LENGTH, WIDTH = 64, 8
_documents = torch.tensor([0] * 20 + [1] * 14 + [2] * 30)
_images = torch.arange(LENGTH) // 16

# {title: mask_mod or score_mod of (h, q_idx, kv_idx)}
MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "causal": lambda q, k: q >= k,
    "sliding window": lambda q, k: (q - k).abs() <= 8,
    "causal window": lambda q, k: (q >= k) & (q - k <= 12),
    "prefix LM": lambda q, k: (k < 20) | (q >= k),
    "documents": lambda q, k: (_documents[q] == _documents[k]) & (q >= k),
    "dilated window": lambda q, k: ((q - k).abs() <= 24) & ((q - k) % 4 == 0),
    "neighbourhood in a picture": lambda q, k: (
        ((q // WIDTH - k // WIDTH).abs() <= 1) & ((q % WIDTH - k % WIDTH).abs() <= 1)
    ),
    "image before text (Flamingo)": lambda q, k: (_images[q] == _images[k]) & (k % 16 < 4),
}
SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ALiBi": lambda q, k: -0.1 * (q - k).abs(),
    "relative bias": lambda q, k: torch.cos((q - k) / 4.0) * torch.exp(-(q - k).abs() / 24.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    q, k = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
    figure, axes = plt.subplots(2, 5, figsize=(10, 4.6), layout="constrained")
    for axis, (title, function) in zip(axes.flat, [*MASKS.items(), *SCORES.items()], strict=True):
        values = function(q, k).expand(LENGTH, LENGTH)
        axis.imshow(values.float(), cmap="Blues" if title in MASKS else "coolwarm", interpolation="nearest")
        axis.set_title(title, fontsize=8)
        axis.set(xticks=[], yticks=[])
    axes[0, 0].set(xlabel="key", ylabel="query")
    figure.savefig(parser.parse_args().path, dpi=80)


if __name__ == "__main__":
    main()
