"""torch's module and ours side by side: same weights, masks and inputs, and the comparison of all results."""

import math
import warnings

import torch
from torch import nn

from flash_attn_ext import MultiheadAttention

B, SQ, SK, E, H = 3, 7, 10, 12, 2

# Largest difference allowed, relative to the largest value of the reference.
RTOL = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}

FORWARDS = {
    "no_weights": {"need_weights": False},
    "averaged": {"need_weights": True},
    "per_head": {"need_weights": True, "average_attn_weights": False},
}

MASKS = ["none", "kpm_bool", "kpm_float", "attn2_bool", "attn2_float", "attn3_bool", "attn3_float"]
MASKS += ["kpm_bool+attn2_bool", "kpm_bool+attn3_bool", "kpm_float+attn2_float", "kpm_float+attn3_float"]
MASKS += ["kpm_bool+attn2_float", "kpm_float+attn3_bool", "causal", "causal+kpm_bool", "causal+kpm_float"]


def assert_same(got, want, rtol=None):
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    rtol = RTOL[want.dtype] if rtol is None else rtol
    if want.numel():
        scale = want.detach().abs().max().clamp_min(1e-3)
        difference = (got.detach() - want.detach()).abs().max()
        # "not <=" so that a NaN fails.
        assert difference <= rtol * scale, f"difference {difference:.3g} of largest value {scale:.3g}"


def make_pair(dtype=torch.float64, embed_dim=E, num_heads=H, **kwargs):
    """torch's module and our module with equal parameters. No parameter has a special initial value such as 0."""
    torch_mha = nn.MultiheadAttention(embed_dim, num_heads, dtype=dtype, **kwargs)
    for parameter in torch_mha.parameters():
        nn.init.normal_(parameter, std=0.4)
    ours = MultiheadAttention(embed_dim, num_heads, dtype=dtype, **kwargs)
    ours.load_state_dict(torch_mha.state_dict())
    return torch_mha, ours


def make_masks(kind, layout="batch_first", seqlen_q=SQ, seqlen_k=SK, dtype=torch.float64):
    """Keyword arguments of forward; every row keeps at least key 0, as torch would give NaN otherwise."""
    masks = {}
    batch = 1 if layout == "unbatched" else B
    for part in kind.split("+"):
        if part == "none":
            continue
        if part == "causal":
            masks["attn_mask"] = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).triu(1)
            masks["is_causal"] = True
            continue
        name, polarity = part.split("_")
        shape = {
            "kpm": (batch, seqlen_k),
            "attn2": (seqlen_q, seqlen_k),
            "attn3": (batch * H, seqlen_q, seqlen_k),
        }
        mask = torch.rand(shape[name]) < 0.4
        mask[..., 0] = False
        if polarity == "float":
            mask = torch.randn(mask.shape, dtype=dtype).masked_fill(mask, -math.inf)
        if name == "kpm" and layout == "unbatched":
            mask = mask.squeeze(0)
        masks["key_padding_mask" if name == "kpm" else "attn_mask"] = mask
    if "causal+kpm_float" in kind:  # torch adds its bool attn_mask to it
        masks["attn_mask"] = torch.zeros(seqlen_q, seqlen_k, dtype=dtype).masked_fill(masks["attn_mask"], -math.inf)
    return masks


def make_inputs(layout="batch_first", dtype=torch.float64, kdim=E, vdim=E, seqlen_q=SQ, seqlen_k=SK):
    shape = {
        "batch_first": lambda s, e: (B, s, e),
        "seq_first": lambda s, e: (s, B, e),
        "unbatched": lambda s, e: (s, e),
    }[layout]
    sizes = ((seqlen_q, E), (seqlen_k, kdim), (seqlen_k, vdim))
    return [torch.randn(shape(*size), dtype=dtype) for size in sizes]


def run_with_grads(module, inputs, masks, forward):
    """out, weights and the gradients of a fixed random loss over both, by name."""
    inputs = {id(x): x for x in inputs}, [id(x) for x in inputs]  # one leaf for each distinct tensor
    leaves = {key: x.clone().requires_grad_() for key, x in inputs[0].items()}
    module.zero_grad()
    out, weights = module(*(leaves[key] for key in inputs[1]), **masks, **forward)
    generator = torch.Generator().manual_seed(1)
    loss = (out * torch.randn(out.shape, generator=generator, dtype=out.dtype)).sum()
    if weights is not None:
        loss = loss + (weights * torch.randn(weights.shape, generator=generator, dtype=weights.dtype)).sum()
    loss.backward()
    results = {"out": out, "weights": weights}
    results |= {f"input {i}": leaf.grad for i, leaf in enumerate(leaves.values())}
    results |= {name: parameter.grad for name, parameter in module.named_parameters()}
    return results


def compare(torch_mha, ours, inputs, masks, forward):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Support for mismatched")
        want = run_with_grads(torch_mha, inputs, masks, forward)
        got = run_with_grads(ours, inputs, masks, forward)
    assert got.keys() == want.keys()
    for name in want:
        if want[name] is None:
            assert got[name] is None, name
        else:
            assert_same(got[name], want[name])
