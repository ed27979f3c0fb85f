"""The derivatives of the indexer's operators (csrc/ops/indexer/indexer.h). The choice of keys has no derivative."""

from typing import Any, NoReturn

import torch
from torch import Tensor

from .. import _ops

Gradients = tuple[Tensor | None, ...]


def _save_scores(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
    ctx.options = keyword_only_inputs


def _scores_backward(ctx: Any, grad: Tensor) -> Gradients:
    return *_ops.indexer_scores_backward(grad, *ctx.saved_tensors, **ctx.options), None


def _save_loss(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    _, index_lse, mass = output
    ctx.mark_non_differentiable(index_lse, mass)
    ctx.save_for_backward(index_lse, mass, *inputs)
    ctx.options = keyword_only_inputs


def _loss_backward(ctx: Any, grad_loss: Tensor, *_: object) -> Gradients:
    index_lse, mass, *inputs = ctx.saved_tensors
    gradients = _ops.indexer_loss_backward(grad_loss, index_lse, mass, *inputs, **ctx.options)
    return *gradients, *[None] * (len(inputs) - 3)


def _refuse_second(name: str) -> Any:
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise NotImplementedError(f"{name}: got a second derivative; allowed: first derivatives, in reverse mode")

    return backward


torch.library.register_autograd(
    "flash_attn_ext::indexer_scores", _scores_backward, setup_context=_save_scores
)  # fmt: skip
torch.library.register_autograd("flash_attn_ext::indexer_loss", _loss_backward, setup_context=_save_loss)
torch.library.register_autograd("flash_attn_ext::indexer_scores_backward", _refuse_second("indexer_scores"))
torch.library.register_autograd("flash_attn_ext::indexer_loss_backward", _refuse_second("indexer_loss"))
