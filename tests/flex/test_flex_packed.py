"""Functions of the user on packed sequences and on caches: each sequence alone gives the same results."""

import pytest
import torch
from flex_reference import dense_flex
from torch.nn.attention.flex_attention import create_block_mask, noop_mask

from flash_attn_ext import explain_kvcache, explain_varlen, flash_attn_varlen, flash_attn_with_kvcache

LENGTHS_Q, LENGTHS_K = (70, 0, 5, 130), (70, 9, 33, 90)


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def tensor(*shape, grad=True):
    return torch.randn(*shape, dtype=torch.float64).requires_grad_(grad)


def functions(heads, table):
    def score_mod(score, b, h, q, k):
        return torch.tanh(score) * (b + 1) + table[h, (q - k) % table.shape[1]]

    def mask_mod(b, h, q, k):
        return (q + 40 >= k) & ((q + k + h) % 5 != b)

    return score_mod, mask_mod


@pytest.mark.parametrize("masks", ["function", "blocks"])
def test_packed_sequences_and_their_gradients(masks):
    heads, head_dim = 4, 8
    q, k, v = (tensor(sum(n), h, head_dim) for n, h in ((LENGTHS_Q, heads), (LENGTHS_K, 2), (LENGTHS_K, 2)))
    table = tensor(heads, 50)
    score_mod, mask_mod = functions(heads, table)
    cu_q, cu_k = offsets(LENGTHS_Q), offsets(LENGTHS_K)
    mask = create_block_mask(mask_mod, len(LENGTHS_Q), heads, 130, 96, "cpu", BLOCK_SIZE=32)
    given = {"mask_mod": mask_mod} if masks == "function" else {"block_mask": mask}
    out, lse = flash_attn_varlen(q, k, v, cu_q, cu_k, enable_gqa=True, return_lse=True, score_mod=score_mod, **given)
    outs, lses = [], []
    for b in range(len(LENGTHS_Q)):
        if LENGTHS_Q[b] == 0:
            continue
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        own = [t.transpose(0, 1)[None] for t in (q[rows], k[keys], v[keys])]

        def score_of(score, _, h, i, j, b=b):
            return score_mod(score, torch.tensor(b), h, i, j)

        def mask_of(_, h, i, j, b=b):
            return mask_mod(torch.tensor(b), h, i, j)

        exact, exact_lse = dense_flex(*own, score_of, mask_of)
        outs.append(exact[0].transpose(0, 1))
        lses.append(exact_lse[0])
    wanted, wanted_lse = torch.cat(outs), torch.cat(lses, 1)
    torch.testing.assert_close((out, lse), (wanted, wanted_lse))
    finite = lse.isfinite()
    dout = torch.randn_like(out)
    grads, exact = (
        torch.autograd.grad((o * dout).sum() + s[finite].sin().sum(), (q, k, v, table))
        for o, s in ((out, lse), (wanted, wanted_lse))
    )
    torch.testing.assert_close(grads, exact)


def test_packed_second_derivatives():
    lengths = (3, 4)
    q, k, v = (tensor(7, 2, 3) for _ in range(3))
    table = tensor(2, 9)
    cu = offsets(lengths)

    def attend(q, k, v, table):
        return flash_attn_varlen(
            q, k, v, cu, cu, causal="lower_right", score_mod=lambda s, b, h, i, j: torch.tanh(s) * table[h, i + j]
        )

    assert torch.autograd.gradcheck(attend, (q, k, v, table), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(attend, (q, k, v, table), fast_mode=True)


def test_a_pack_gives_the_bits_of_each_sequence():
    q, k, v = (torch.randn(sum(LENGTHS_Q), 2, 16) for _ in range(3))
    cu = offsets(LENGTHS_Q)
    out = flash_attn_varlen(q, k, v, cu, cu, score_mod=lambda s, b, h, i, j: s - 0.1 * (i - j).abs())
    rows = slice(cu[3], cu[4])
    alone = [t[rows] for t in (q, k, v)]
    one = offsets(LENGTHS_Q[3:])
    again = flash_attn_varlen(*alone, one, one, score_mod=lambda s, b, h, i, j: s - 0.1 * (i - j).abs())
    assert torch.equal(out[rows], again)


@pytest.mark.parametrize("seqlen_q", [1, 3, 20])
@pytest.mark.parametrize("paged", [False, True])
def test_caches(seqlen_q, paged):
    batch, heads, heads_kv, head_dim, rows = 2, 4, 2, 16, 96
    lengths = torch.tensor([83, 50])
    q = tensor(batch, seqlen_q, heads, head_dim, grad=False)
    k, v = (tensor(batch, rows, heads_kv, head_dim, grad=False) for _ in range(2))
    score_mod, mask_mod = functions(heads, tensor(heads, 11, grad=False))
    caches, more = (k, v), {}
    if paged:
        table = torch.tensor([[5, 1, 3], [2, 4, 0]])
        caches = tuple(torch.empty(6, 32, heads_kv, head_dim, dtype=t.dtype) for t in (k, v))
        for cache, t in zip(caches, (k, v), strict=True):
            cache[table] = t.unflatten(1, (3, 32))
        more = {"block_table": table}
    mask = create_block_mask(mask_mod, batch, heads, rows, rows, "cpu", BLOCK_SIZE=16)
    for masks in ({"mask_mod": mask_mod}, {"block_mask": mask}):
        out, lse = flash_attn_with_kvcache(
            q,
            *caches,
            cache_seqlens=lengths,
            causal=True,
            score_mod=score_mod,
            return_softmax_lse=True,
            **masks,
            **more,
        )
        for b, length in enumerate(lengths.tolist()):
            own = [t[b, :length].transpose(0, 1)[None] for t in (k, v)]
            first = length - seqlen_q  # q_idx is the position of the query's token
            exact, exact_lse = dense_flex(
                q[b].transpose(0, 1)[None], *own,
                lambda s, _, h, i, j, b=b, first=first: score_mod(s, torch.tensor(b), h, i + first, j),
                lambda _, h, i, j, b=b, first=first: mask_mod(torch.tensor(b), h, i + first, j) & (i + first >= j),
            )  # fmt: skip
            torch.testing.assert_close(out[b], exact[0].transpose(0, 1))
            torch.testing.assert_close(lse[b], exact_lse[0])


@pytest.mark.parametrize("seqlen_q", [8, 9, 40])
@pytest.mark.parametrize("has_function", [True, False])
def test_a_block_mask_hides_no_key_from_queries_before_the_first_key(isa, seqlen_q, has_function):
    check_queries_before_the_first_key(seqlen_q, has_function, torch.float32)


def check_queries_before_the_first_key(seqlen_q, has_function, dtype):
    """With fewer keys than queries, the first queries have negative positions. No block holds these queries."""
    q, k, v = torch.randn(1, seqlen_q, 2, 16, dtype=dtype), *torch.randn(2, 1, 64, 2, 16, dtype=dtype)
    mask_mod = (lambda b, h, i, j: i // 16 == j // 16) if has_function else (lambda b, h, i, j: j >= 0)
    mask = create_block_mask(mask_mod, None, None, 64, 64, "cpu", BLOCK_SIZE=16)
    if not has_function:
        mask.kv_num_blocks.zero_()
        mask.full_kv_num_blocks[:, :, 0] = 0  # hides all keys from the queries of the first block
        mask.mask_mod = noop_mask
    options = dict(cache_seqlens=5, return_softmax_lse=True)
    out, lse = flash_attn_with_kvcache(q, k, v, block_mask=mask, **options)
    if has_function:
        wanted, wanted_lse = flash_attn_with_kvcache(q, k, v, mask_mod=mask_mod, **options)
    else:
        wanted, wanted_lse = flash_attn_with_kvcache(q, k, v, **options)
        wanted[:, -5:], wanted_lse[..., -5:] = 0, -torch.inf
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)


def test_few_queries_use_the_decode_kernel():
    q, k, v = (torch.randn(1, n, 2, 16) for n in (1, 4096, 4096))
    hidden = create_block_mask(lambda b, h, i, j: j >= 2048, None, None, 4096, 4096, "cpu")
    given = {"score_mod": lambda s, b, h, i, j: s * 2, "block_mask": hidden}
    assert explain_kvcache(q, k, v, **given).forward.splits > 1
    wanted = flash_attn_with_kvcache(q, k[:, 2048:], v[:, 2048:], softmax_scale=2 * 16**-0.5)
    torch.testing.assert_close(flash_attn_with_kvcache(q, k, v, **given), wanted)
    one = flash_attn_with_kvcache(q, k, v, num_splits=1, **given)
    torch.testing.assert_close(one, wanted)


def test_a_hidden_nan_in_a_cache_does_not_reach_the_result():
    q, k, v = (torch.randn(1, n, 2, 16) for n in (1, 100, 100))
    k[:, 40:50] = v[:, 40:50] = torch.nan
    out = flash_attn_with_kvcache(q, k, v, mask_mod=lambda b, h, i, j: (j < 40) | (j >= 50))
    assert out.isfinite().all()


def test_refused_arguments_are_named():
    q = torch.randn(50, 2, 8)
    cu = offsets((20, 30))
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, "cpu", BLOCK_SIZE=16)
    with pytest.raises(ValueError, match=r"block_mask: got 1 x 1 blocks of 16 x 16; allowed: at least the 20 queries"):
        flash_attn_varlen(q, q, q, cu, cu, block_mask=mask)
    cache = torch.randn(1, 64, 2, 8)
    new = torch.randn(1, 1, 2, 8)
    before = cache.clone()
    with pytest.raises(
        ValueError, match=r"block_mask: got one for 16 keys; allowed: at least the longest sequence's 64"
    ):
        flash_attn_with_kvcache(new, cache, cache.clone(), new, new, cache_seqlens=63, block_mask=mask)
    assert torch.equal(cache, before)


def test_explain_shows_programs_and_blocks():
    q = torch.randn(50, 2, 8)
    cu = offsets((20, 30))
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 32, 32, "cpu", BLOCK_SIZE=16)
    text = str(explain_varlen(q, q, q, cu, cu, score_mod=lambda s, b, h, i, j: s - i, block_mask=mask))
    assert "program of the score: 3 instructions" in text
    assert "blocks: 3 of 4 visited, 1 full, 2 partial" in text
    caches = (torch.randn(1, 32, 2, 8) for _ in range(2))
    assert "blocks: 3 of 4 visited" in str(explain_kvcache(torch.randn(1, 3, 2, 8), *caches, block_mask=mask))
