"""flash_attn_with_kvcache: masks over the new tokens (speculative decoding) and attention sinks, against dense."""

import re

import pytest
import torch
from cache_helpers import LENGTHS, D, H, check, make, rows_of

from flash_attn_ext import flash_attn_with_kvcache

pytestmark = pytest.mark.usefixtures("one_thread")
TREE = [70, 64, 200, 6, 130]  # rows in the caches; the last rows are the keys of the queries


def tree(*shape, parents=(-1, 0, 0, 1, 1, 2)):
    """Returns a mask: True for a token's ancestors and itself. Each leading index has a different tree."""
    count = len(parents)
    mask = torch.zeros(*shape, count, count, dtype=torch.bool)
    for n, one in enumerate(mask.view(-1, count, count)):
        for i, parent in enumerate(parents):
            one[i] |= torch.arange(count) == i
            if parent >= 0:
                one[i] |= one[max(parent - n, 0)]
    return mask


def after_the_cache(mask, seqlen_k):
    """Returns (H or 1, S_q, S_q) as a dense mask (1, H or 1, S_q, seqlen_k)."""
    seen = torch.ones(*mask.shape[:-1], seqlen_k - mask.shape[-1], dtype=torch.bool)
    if mask.dtype != torch.bool:
        seen = torch.zeros_like(seen, dtype=mask.dtype)
    return torch.cat([seen, mask], -1)[None]


FORMS = {
    "one": lambda: (tree(), lambda m, b: m[None]),
    "by sequence": lambda: (tree(5), lambda m, b: m[b][None]),
    "by head": lambda: (tree(1, H), lambda m, b: m[0]),
    "all": lambda: (tree(5, H), lambda m, b: m[b]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("page_size", [None, 1, 16])
def test_each_token_sees_its_ancestors(isa, form, page_size):
    mask, of_sequence = FORMS[form]()
    q, k_cache, v_cache, block_table = make(torch.float32, 6, page_size, TREE)
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=torch.tensor(TREE), block_table=block_table, tree_mask=mask,
        return_softmax_lse=True,
    )  # fmt: skip
    check(out, lse, q, k_cache, v_cache, TREE, block_table,
          mask=lambda b, n: after_the_cache(of_sequence(mask, b), n))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (40, -1)}, {"num_splits": 3}, {"softcap": 2.0}],
                         ids=str)  # fmt: skip
def test_with_other_options(dtype, options):
    mask = tree(5)
    q, k_cache, v_cache, block_table = make(dtype, 6, 16, TREE)
    given = {{"window": "window_size"}.get(name, name): value for name, value in options.items()}
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=torch.tensor(TREE), block_table=block_table, tree_mask=mask,
        return_softmax_lse=True, **given,
    )  # fmt: skip
    options = {name: value for name, value in options.items() if name != "num_splits"}
    check(out, lse, q, k_cache, v_cache, TREE, block_table, mask=lambda b, n: after_the_cache(mask[b][None], n),
          **options)  # fmt: skip


def test_many_new_tokens(isa):
    """More queries than the decode kernel has: there the scores are transposed."""
    lengths = [70, 200, 129]
    mask = torch.rand(3, 1, 65, 65) < 0.5
    q, k_cache, v_cache, block_table = make(torch.float32, 65, 16, lengths)
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=torch.tensor(lengths), block_table=block_table, tree_mask=mask,
        return_softmax_lse=True,
    )  # fmt: skip
    check(out, lse, q, k_cache, v_cache, lengths, block_table, mask=lambda b, n: after_the_cache(mask[b], n))


def test_a_float_mask_is_added_and_left_padding_is_left_out():
    mask, leftpad = torch.randn(6, 6), torch.tensor([0, 7, 100, 0, 64])
    q, k_cache, v_cache, _ = make(torch.float32, 6, None, TREE)
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=torch.tensor(TREE), tree_mask=mask, cache_leftpad=leftpad,
        return_softmax_lse=True,
    )  # fmt: skip
    check(out, lse, q, k_cache, v_cache, TREE, leftpad=leftpad, mask=lambda b, n: after_the_cache(mask[None], n))


def test_packed_trees_of_different_sizes():
    """The mask has a row for each row of q, and a column for each token of the sequence."""
    counts, lengths = [6, 0, 3], [70, 20, 200]
    _, k_cache, v_cache, block_table = make(torch.float32, 1, 16, lengths)
    q, cu_seqlens = torch.randn(9, H, D), torch.tensor([0, 6, 6, 9])
    mask = torch.zeros(9, 6, dtype=torch.bool)
    mask[:6], mask[6:, :3] = tree(), tree(parents=(-1, 0, 0))
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=torch.tensor(lengths), block_table=block_table, tree_mask=mask,
        cu_seqlens_q=cu_seqlens, return_softmax_lse=True,
    )  # fmt: skip
    for b in (0, 2):
        own, n = slice(*cu_seqlens[b : b + 2].tolist()), counts[b]
        rows = [rows_of(t, block_table, b, 0, lengths[b]).transpose(1, 2) for t in (k_cache, v_cache)]
        check(out[own][None], lse[None, :, own], q[own][None], *rows, [lengths[b]],
              mask=lambda _, seqlen_k, own=own, n=n: after_the_cache(mask[own, :n][None], seqlen_k))  # fmt: skip


def test_a_causal_tree_is_causal():
    q, k_cache, v_cache, _ = make(torch.float32, 6, None, TREE)
    lengths, line = torch.tensor(TREE), torch.ones(6, 6, dtype=torch.bool).tril()
    a = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, tree_mask=line)
    b = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, causal=True)
    torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_a_hidden_token_may_be_nan():
    """A NaN in a key or value reaches only the queries that see this key."""
    q, k_cache, v_cache, _ = make(torch.float32, 6, None, [70])
    lengths, mask = torch.tensor([70]), tree()
    expected = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, tree_mask=mask)
    k_cache[0, 70 - 6 + 2], v_cache[0, 70 - 6 + 2] = torch.nan, torch.nan  # token 2, the parent of 5
    out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, tree_mask=mask)
    sees = mask[:, 2]
    assert torch.equal(out[:, ~sees], expected[:, ~sees])
    assert out[:, sees].isnan().all()


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(("seqlen_q", "num_splits"), [(1, 0), (1, 3), (3, 5), (50, 0)])
def test_sink(isa, batched, seqlen_q, num_splits):
    """With an empty cache lse equals the sink."""
    sink = torch.randn((len(LENGTHS), H) if batched else (H,))
    q, k_cache, v_cache, block_table = make(torch.float32, seqlen_q, 16)
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=torch.tensor(LENGTHS), block_table=block_table, sink=sink, causal=True,
        num_splits=num_splits, return_softmax_lse=True,
    )  # fmt: skip
    check(out, lse, q, k_cache, v_cache, LENGTHS, block_table, sink=sink, causal=True)


def test_sink_of_caches_without_any_row():
    q, sink = torch.randn(2, 3, H, D), torch.randn(2, H)
    empty = torch.zeros(2, 0, H, D)
    out, lse = flash_attn_with_kvcache(q, empty, empty, cache_seqlens=0, sink=sink, return_softmax_lse=True)
    assert (out == 0).all()
    assert torch.equal(lse, sink[:, :, None].expand(2, H, 3))


BAD = {
    "columns": (dict(tree_mask=torch.ones(2, 3)), "tree_mask: got shape [1, 1, 2, 3], with size 3 in dimension 3; "
                "allowed there: 1 or 2 (max_seqlen_q)"),
    "sequences": (dict(tree_mask=torch.ones(4, 2, 2)), "tree_mask: got shape [4, 1, 2, 2], with size 4 in dimension 0"),
    "dimensions": (dict(tree_mask=torch.ones(2)), "tree_mask: got shape"),
    "sink": (dict(sink=torch.ones(3)), "sink: got shape [3]; allowed: (heads) = [4]"),
    "two sinks": (dict(sink=torch.ones(4), learnable_sink=torch.ones(4)), "learnable_sink: got one together with sink"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(case):
    arguments, message = BAD[case]
    q, k_cache, v_cache, _ = make(seqlen_q=2, lengths=[20, 20])
    with pytest.raises(ValueError, match=re.escape(message)):
        flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=20, **arguments)
    with pytest.raises(TypeError, match="tree_mask: got dtype int64; allowed: bool"):
        flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=20, tree_mask=torch.ones(2, 2).long())
