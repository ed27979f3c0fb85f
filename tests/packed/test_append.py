"""append_to_cache: the rows that it writes, their rotation and rounding, and torch.compile."""

import pytest
import torch
from cache_helpers import DV, HK, LENGTHS, ROWS, D, H, make, rotary_tables, rotated_pair

from flash_attn_ext import _append, _ops, flash_attn_with_kvcache

pytestmark = pytest.mark.usefixtures("one_thread")
NEW = [4, 1, 0, 6, 2]


def operands(dtype=torch.float32, page_size=None, rotary=True, leftpad=True, cache_dtype=None):
    """Positional arguments of the operator, with packed rows of different numbers."""
    _, k_cache, v_cache, block_table = make(dtype, 1, page_size)
    if cache_dtype:
        k_cache, v_cache = (torch.zeros_like(t, dtype=cache_dtype) for t in (k_cache, v_cache))
    q, k, v = (torch.randn(sum(NEW), heads, d).to(dtype) for heads, d in ((H, D), (HK, D), (HK, DV)))
    cu_seqlens = torch.tensor([0, *NEW]).cumsum(0, dtype=torch.int32)
    scales = [torch.rand(t.shape[:3]) / 20 + 0.01 if cache_dtype else None for t in (k_cache, v_cache)]
    tables = rotary_tables(ROWS, 24) if rotary else (None, None)
    padding = torch.tensor([3, 0, 100, 5, 0]) if leftpad else None
    return (q, k, v, k_cache, v_cache, cu_seqlens, cu_seqlens, torch.tensor(LENGTHS), *tables, None, None, padding,
            block_table, *scales)  # fmt: skip


def copies(arguments):
    """The arguments with copies of the caches."""
    return tuple(t.clone() if n in (3, 4) else t for n, t in enumerate(arguments))


@pytest.mark.parametrize(
    ("dtype", "page_size"),
    [
        (torch.float32, None),
        (torch.float32, 1),
        (torch.float64, 16),
        (torch.bfloat16, None),
        (torch.bfloat16, 16),
        (torch.float16, 16),
    ],
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_equals_the_operator_of_cuda(isa, dtype, page_size, interleaved):
    """The operator of CUDA is written in operations of torch."""
    ours = operands(dtype, page_size)
    theirs = copies(ours)
    results = _ops.append_to_cache(*ours, interleaved=interleaved)
    expected = _append.append_to_cache(*theirs, interleaved=interleaved)
    for a, b in zip((*results, *ours[3:5]), (*expected, *theirs[3:5]), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("page_size", [None, 16])
def test_8_bits_are_rounded_as_torch_does(isa, cache_dtype, page_size):
    ours = operands(page_size=page_size, rotary=False, cache_dtype=cache_dtype)
    theirs = copies(ours)
    _ops.append_to_cache(*ours)
    _append.append_to_cache(*theirs)
    for n in (3, 4):
        assert torch.equal(ours[n].view(torch.uint8), theirs[n].view(torch.uint8))


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_float8_and_the_values_between(isa, cache_dtype):
    """Ties, subnormals, values beyond the largest, NaN."""
    exact = torch.arange(256, dtype=torch.uint8).view(cache_dtype).float()
    exact = exact[exact.isfinite()].sort().values
    values = torch.cat([exact, (exact[1:] + exact[:-1]) / 2, exact * 1.01, torch.tensor([1e6, -1e6, torch.nan])])
    values = torch.nn.functional.pad(values, (0, -len(values) % 8)).view(-1, 1, 8)
    caches = torch.zeros(2, 1, len(values), 1, 8, dtype=cache_dtype)
    offsets = torch.tensor([0, len(values)])
    _ops.append_to_cache(values, values, values, *caches, offsets, offsets, torch.tensor([0]))
    expected = _append.coded(values, cache_dtype, 1.0)
    assert torch.equal(caches[0][0].view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("interleaved", [False, True])
def test_left_padding_does_not_move_rotary_positions(interleaved):
    """As in flash-attention 2 and 3, the first new key has position cache_seqlens with every cache_leftpad."""
    lengths, leftpad, new = [70, 5, 30], torch.tensor([10, 5, 0]), 3
    q, k, v = torch.randn(3, new, H, D), torch.randn(3, new, HK, D), torch.randn(3, new, HK, DV)
    _, k_cache, v_cache, _ = make(lengths=lengths)
    tables = rotary_tables(ROWS, 16)
    flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, *tables, torch.tensor(lengths), cache_leftpad=leftpad, causal=True,
        rotary_interleaved=interleaved,
    )  # fmt: skip
    for b, length in enumerate(lengths):
        for n in range(new):
            expected = rotated_pair(k[b, n, 1], length + n, 16, interleaved)
            torch.testing.assert_close(k_cache[b, length + n, 1], expected, rtol=1e-4, atol=1e-5)


def test_rotary_seqlens_replace_the_lengths():
    _, k_cache, v_cache, _ = make(lengths=[70, 5])
    q, k, v = torch.randn(2, 1, H, D), torch.randn(2, 1, HK, D), torch.randn(2, 1, HK, DV)
    positions = torch.tensor([3, 100], dtype=torch.int32)
    flash_attn_with_kvcache(q, k_cache, v_cache, k, v, *rotary_tables(ROWS, 32), torch.tensor([70, 5]),
                            rotary_seqlens=positions)  # fmt: skip
    for b, length in enumerate([70, 5]):
        expected = rotated_pair(k[b, 0, 0], int(positions[b]), 32, True)
        torch.testing.assert_close(k_cache[b, length, 0], expected, rtol=1e-4, atol=1e-5)


def test_the_schema_declares_the_written_caches():
    written = [a.name for a in _ops.append_to_cache._schema.arguments if a.alias_info and a.alias_info.is_write]
    assert written == [
        "key_cache", "value_cache", "key_group_scale", "value_group_scale", "key_group_zero", "value_group_zero"
    ]  # fmt: skip
    arguments = operands()
    given = {n: t._version for n, t in enumerate(arguments) if t is not None}
    _ops.append_to_cache(*arguments)
    changed = [n for n, version in given.items() if arguments[n]._version != version]
    assert changed == [3, 4]


def test_opcheck():
    arguments = tuple(t.nan_to_num() if t is not None and t.is_floating_point() else t
                      for t in operands(page_size=16))  # fmt: skip
    torch.library.opcheck(_ops.append_to_cache, arguments, {"interleaved": False})


def test_a_decode_step_compiles_as_one_graph():
    """Two steps of projections, rotation, append and attention. The lengths change between the steps."""
    torch.manual_seed(0)
    width = H * D
    weights = [torch.randn(width, heads * D) / width**0.5 for heads in (H, HK, HK, H)]
    tables = rotary_tables(ROWS, D)

    def step(x, k_cache, v_cache, lengths, block_table):
        q, k, v = ((x @ w).unflatten(-1, (-1, D)) for w in weights[:3])
        out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, *tables, lengths, block_table=block_table,
                                      causal=True, rotary_interleaved=False)  # fmt: skip
        return x + out.flatten(-2) @ weights[3], lengths + x.shape[1]

    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    block_table = torch.randperm(2 * 16, dtype=torch.int32).view(2, 16)
    caches = torch.zeros(2, 32, 16, HK, D)
    state = (torch.randn(2, 1, width), *caches, torch.tensor([5, 31]), block_table)
    compiled = torch.compile(step, fullgraph=True, backend=keep)
    eager, traced = ([t.clone() for t in state] for _ in range(2))
    for _ in range(2):
        eager[0], eager[3] = step(*eager)
        traced[0], traced[3] = compiled(*traced)
    for a, b in zip(eager, traced, strict=True):
        torch.testing.assert_close(a, b)
    assert len(graphs) == 1
    assert _ops.append_to_cache in [node.target for node in graphs[0].graph.nodes]


BAD = {
    "dtype of k": (1, torch.randn(13, HK, D).bfloat16(), TypeError, "key: got dtype bfloat16; allowed: query's"),
    "cache columns": (3, torch.zeros(5, ROWS, HK, D, 2)[..., 0], ValueError, "key_cache: got strides"),
    "other cache": (4, torch.zeros(5, ROWS, HK, DV).char(), TypeError, "value_cache: got dtype int8; allowed"),
    "descending": (6, torch.tensor([0, 4, 3, 5, 11, 13]), ValueError, "cu_seqlens_k_new: got 3 after 4 at 2"),
    "past the end": (6, torch.tensor([0, 4, 5, 5, 11, 14]), ValueError, "cu_seqlens_k_new: got offsets from 0 to 14"),
    "negative length": (7, torch.tensor([70, -1, 0, 0, 0]), ValueError, "cache_seqlens: got -1 at 1"),
    "full": (7, torch.tensor([253, 0, 0, 0, 0]), ValueError, "cache_seqlens: got new rows at 253 to 256"),
    "tables": (8, torch.ones(ROWS, 40), ValueError, r"rotary_cos: got shape \[256, 40\]; allowed: .positions"),
    "one table": (9, None, ValueError, "rotary_cos: got one of rotary_cos and rotary_sin"),
    "short table": (9, torch.ones(50, 12), ValueError, "rotary_sin: got positions 70 to 73; allowed: 0 to 49"),
    "huge position": (10, torch.tensor([2**63 - 2, 0, 0, 0, 0]), ValueError, "rotary_cos: got positions 922337203685"),
    "negative position": (10, torch.tensor([-1, 0, 0, 0, 0]), ValueError, "rotary_cos: got positions -1 to 2"),
    "cache": (11, torch.tensor([0, 9, 0, 0, 0]), ValueError, "cache_batch_idx: got 9 at 1; allowed: 0 to 4"),
    "left padding": (12, torch.tensor([71, 0, 0, 0, 0]), ValueError, "cache_leftpad: got 71 at 0; allowed: 0 to 70"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_argument_is_named_and_nothing_is_written(case):
    at, bad, error, message = BAD[case]
    arguments = list(operands())
    arguments[12] = (
        None
        if "length" in case or case in ("full", "negative position", "huge position")
        else torch.tensor([3, 0, 0, 5, 0])
    )
    arguments[at] = bad
    before = [arguments[n].clone() for n in (3, 4)]
    with pytest.raises(error, match=message):
        _ops.append_to_cache(*arguments)
    for cache, old in zip((arguments[3], arguments[4]), before, strict=True):
        assert torch.equal(cache.nan_to_num(), old.nan_to_num())
