"""Small calls of every tier, for smoke.py and sanitize.py."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Call:
    """Tensors (B, H, S, D) of torch's `dtype`, and options of flash_attn."""

    dtype: str
    B: int
    H: int
    H_kv: int
    S_q: int
    S_k: int
    D: int
    options: dict = field(default_factory=dict)


# The GPUs that run a tier, by ten times their compute capability.
GPUS = {"simt": range(75, 1000), "sm75": range(75, 76), "sm80": range(80, 1000), "sm90": range(90, 91)}

# By tier, then by name. No length is a multiple of a tile. sm75 and sm80 run 16 bits and D in multiples of 8; sm75 only
# float16 and D up to 128. simt runs all calls.
CALLS = {
    "simt": {
        "causal": Call("float32", 1, 2, 1, 70, 75, 20, {"is_causal": True}),
        "64 bits": Call("float64", 1, 1, 1, 20, 70, 9),
        "decoding": Call("bfloat16", 1, 4, 1, 1, 300, 64),
    },
    "sm75": {
        "D 24, causal": Call("float16", 1, 2, 1, 70, 75, 24, {"is_causal": True}),
        "D 64, softcap": Call("float16", 1, 2, 2, 130, 75, 64, {"softcap": 5.0}),
        "D 128": Call("float16", 1, 2, 2, 300, 330, 128),
        "D 128, deterministic": Call("float16", 1, 4, 2, 300, 330, 128, {"deterministic": True}),
        "decoding": Call("float16", 1, 8, 2, 1, 1000, 128),
    },
    "sm80": {
        "D 24, causal": Call("bfloat16", 1, 2, 1, 70, 75, 24, {"is_causal": True}),
        "D 64, softcap": Call("float16", 1, 2, 2, 130, 75, 64, {"softcap": 5.0}),
        "D 128": Call("bfloat16", 1, 2, 2, 300, 330, 128),
        "D 256": Call("bfloat16", 1, 2, 1, 100, 140, 256),
        "decoding": Call("bfloat16", 1, 8, 2, 1, 1000, 128),
    },
    "sm90": {
        "D 64": Call("bfloat16", 1, 2, 1, 500, 600, 64),
        "D 64, causal": Call("bfloat16", 1, 2, 1, 200, 150, 64, {"is_causal": True}),
        "D 128": Call("float16", 1, 2, 2, 330, 300, 128),
        "D 128, window": Call("bfloat16", 1, 1, 1, 400, 400, 128, {"window": (100, 0)}),
        "D 256": Call("bfloat16", 1, 2, 2, 270, 300, 256),
        "D 256, causal": Call("bfloat16", 1, 1, 1, 170, 200, 256, {"causal": "lower_right"}),
        "D 128, heads share tiles": Call("bfloat16", 2, 16, 2, 20, 700, 128, {"causal": "lower_right"}),
        "D 64, split keys": Call("bfloat16", 1, 2, 2, 100, 5000, 64),
        "D 256, split keys": Call("float16", 1, 8, 1, 30, 3000, 256, {"softcap": 5.0}),
        "D 128, deterministic": Call("bfloat16", 1, 4, 2, 600, 700, 128, {"deterministic": True}),
    },
}

# The tiers that have forward mode, with their largest head dimension.
FORWARD_MODE = {"simt": 1024, "sm80": 128}


def has_forward_mode(tier: str, name: str) -> bool:
    """Whether the tier computes the derivative of this call in forward mode."""
    largest = FORWARD_MODE.get(tier, 0)
    return largest >= CALLS[tier][name].D


def inputs(call: Call, requires_grad: bool) -> list:
    """q, k, v on the GPU. They are made on the CPU, so that few foreign kernels run."""
    import torch

    torch.manual_seed(0)
    shapes = [(call.B, call.H, call.S_q, call.D), *[(call.B, call.H_kv, call.S_k, call.D)] * 2]
    return [
        torch.randn(shape, dtype=getattr(torch, call.dtype), device="cpu").cuda().requires_grad_(requires_grad)
        for shape in shapes
    ]
