"""Computes attention by the methods that the papers compare, and one training step through each."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import dropout, scaled_dot_product_attention

from flash_attn_ext import flash_attn


@dataclass(frozen=True)
class Case:
    """Self-attention of (B, H, S, D), forward and backward."""

    method: str
    B: int
    H: int
    S: int
    D: int
    dtype: str = "float32"
    causal: bool = False
    dropout_p: float = 0.0
    device: str = "cpu"

    def score_bytes(self) -> int:
        """The bytes of one matrix of all scores."""
        return self.B * self.H * self.S * self.S * getattr(torch, self.dtype).itemsize


def standard(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, dropout_p: float) -> Tensor:
    """The five kernels of figure 1 in the FlashAttention paper: matmul, mask, softmax, dropout, matmul."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    probs = torch.softmax(scores, -1)
    if dropout_p:
        probs = dropout(probs, dropout_p)
    return probs @ v


def torch_backend(backend: SDPBackend) -> Callable:
    def attention(*args, **kwargs):
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(*args, **kwargs)

    return attention


METHODS: dict[str, Callable] = {
    "standard": standard,
    "torch math": torch_backend(SDPBackend.MATH),
    "torch flash": torch_backend(SDPBackend.FLASH_ATTENTION),
    "torch efficient": torch_backend(SDPBackend.EFFICIENT_ATTENTION),
    "torch cudnn": torch_backend(SDPBackend.CUDNN_ATTENTION),
    "torch default": scaled_dot_product_attention,  # torch chooses one of the four above
    "ours": flash_attn,
}
QUADRATIC = ("standard", "torch math")  # they store the scores
ON_CPU = ("standard", "torch math", "torch flash", "ours")  # torch has no other backends there
ON_CUDA = ("standard", "torch math", "torch flash", "torch efficient", "torch cudnn", "ours")


def training_step(case: Case) -> Callable[[], None]:
    """Returns a function without arguments that runs forward and backward, and waits for the end."""
    torch.manual_seed(0)
    shape, dtype = (case.B, case.H, case.S, case.D), getattr(torch, case.dtype)
    q, k, v = (torch.randn(shape, dtype=dtype, device=case.device, requires_grad=True) for _ in range(3))
    grad = torch.randn(shape, dtype=dtype, device=case.device)
    attention = METHODS[case.method]

    def run() -> None:
        out = attention(q, k, v, is_causal=case.causal, dropout_p=case.dropout_p)
        torch.autograd.grad(out, (q, k, v), grad)
        if case.device != "cpu":
            torch.cuda.synchronize()

    return run
