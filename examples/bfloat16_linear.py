"""Linear layers in bfloat16 at the speed of float32, for CPUs without instructions for bfloat16.

With AVX2 alone, torch multiplies bfloat16 matrices several times slower than float32 matrices. The class below keeps
the roundings of bfloat16 (operands, outputs and gradients) and computes the products between them in float32.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode


def has_fast_products() -> bool:
    """Returns whether torch multiplies bfloat16 matrices on this CPU by oneDNN, which needs AVX-512 on x86."""
    return torch.backends.cpu.get_cpu_capability() not in ("NO AVX", "AVX2")


class Float32Products(TorchFunctionMode):
    """Within this context, torch.nn.functional.linear rounds to bfloat16 and multiplies in float32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return (_Linear.apply if func is linear else func)(*args, **(kwargs or {}))


class _Linear(torch.autograd.Function):
    """x (..., I), weight (O, I), bias (O) or None -> (..., O), all rounded to bfloat16."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return linear(x.float(), weight.float(), None if bias is None else bias.float()).bfloat16()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = (tensor.float() for tensor in ctx.saved_tensors)
        grad = grad.float()
        rows = grad.flatten(0, -2)
        grad_weight = rows.T @ x.flatten(0, -2)
        return (grad @ weight).bfloat16(), grad_weight.bfloat16(), rows.sum(0).bfloat16() if ctx.has_bias else None
