"""Random shapes and options against the oracle, also in combinations that no other test has."""

import pytest
import torch
from helpers import check_against_reference, make_qkv
from hypothesis import example, given
from hypothesis import strategies as st

sizes = st.one_of(st.integers(1, 20), st.sampled_from([47, 48, 49, 63, 64, 65, 100, 129, 160]))
windows = st.one_of(st.none(), st.integers(0, 80), st.tuples(st.integers(-1, 80), st.integers(-1, 80)))
layouts = st.permutations([0, 1, 2])


@st.composite
def calls(draw):
    heads_kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return {
        "batch": draw(st.integers(1, 3)),
        "heads": heads_kv * group,
        "heads_kv": heads_kv,
        "seqlen_q": draw(sizes),
        "seqlen_k": draw(sizes),
        "head_dim": draw(st.integers(1, 70)),
        "head_dim_v": draw(st.integers(1, 70)),
        "dtype": draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])),
        "layout": draw(layouts),
        "mask": draw(st.sampled_from(["none", "bool", "float", "float with -inf"])),
        "mask_broadcast": draw(st.tuples(*[st.booleans()] * 4)),
        "mask_gradient": draw(st.booleans()),
        "alibi": draw(st.sampled_from(["none", "(H)", "(B, H)"])),
        "options": {
            "causal": draw(st.sampled_from([None, "upper_left", "lower_right"])),
            "window": draw(windows),
            "softcap": draw(st.sampled_from([0.0, 0.7, 20.0])),
            "scale": draw(st.sampled_from([None, 0.3, -0.5])),
            "dropout_p": draw(st.sampled_from([0.0, 0.0, 0.25, 0.8])),
        },
        "seed": draw(st.integers(0, 2**32)),
    }


def reordered(t, order):
    """The same values with the first three dimensions in another memory order."""
    back = [order.index(n) for n in range(3)]
    return t.detach().permute(*order, 3).contiguous().permute(*back, 3).requires_grad_()


CORNER = {
    "batch": 1, "heads": 1, "heads_kv": 1, "seqlen_q": 1, "seqlen_k": 1, "head_dim": 1, "head_dim_v": 1,
    "dtype": torch.float32, "layout": [0, 1, 2], "mask": "float with -inf", "mask_broadcast": (True,) * 4,
    "mask_gradient": True, "alibi": "(B, H)", "seed": 1,
    "options": {"causal": "upper_left", "window": (0, 0), "softcap": 0.7, "scale": 0.3, "dropout_p": 0.8},
}  # fmt: skip

# A query with one visible key: dP - delta is 0, but the two sums of 64 terms round differently.
ONE_KEY = CORNER | {
    "batch": 2, "heads": 2, "heads_kv": 2, "seqlen_q": 4, "seqlen_k": 2, "head_dim": 5, "head_dim_v": 64,
    "mask": "bool", "mask_broadcast": (True, True, False, True), "mask_gradient": False, "seed": 975710,
    "options": {"causal": "lower_right", "window": None, "softcap": 0.0, "scale": None, "dropout_p": 0.8},
}  # fmt: skip


@pytest.mark.any_device
@example(CORNER)
@example(ONE_KEY)
@given(calls())
def test_any_call(call):
    torch.manual_seed(call["seed"])
    shape = [call["batch"], call["heads"], call["seqlen_q"], call["seqlen_k"]]
    dtype = call["dtype"]
    q, k, v = make_qkv(*shape, call["head_dim"], call["head_dim_v"], heads_kv=call["heads_kv"], dtype=dtype)
    q, k, v = (reordered(t, call["layout"]) for t in (q, k, v))
    mask_shape = [1 if broadcast else n for n, broadcast in zip(shape, call["mask_broadcast"], strict=True)]
    mask = None
    if call["mask"] == "bool":
        mask = torch.rand(mask_shape) > 0.3
    elif call["mask"] != "none":
        mask = torch.randn(mask_shape, dtype=dtype)
        if "inf" in call["mask"]:
            mask = mask.masked_fill(torch.rand(mask_shape) > 0.7, -torch.inf)
        mask.requires_grad_(call["mask_gradient"])
    slopes = None
    if call["alibi"] != "none":
        slopes = torch.rand(shape[:2] if call["alibi"] == "(B, H)" else shape[1], dtype=dtype).requires_grad_()
    check_against_reference(q, k, v, mask, alibi_slopes=slopes, **call["options"])
