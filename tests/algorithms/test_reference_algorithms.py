"""flash_attn_ext.reference: each algorithm against the dense oracle in fp64. Naive algorithms fail on the inputs."""

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import reference
import torch
from block_masks import BLOCK_MASKS
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_attn_ext import dropout_mask, new_rng_state
from flash_attn_ext.reference import (
    block_sparse,
    flash1,
    flash2,
    flash3_schedule,
    flash_decoding,
    flash_decoding_pp,
    softmax,
    standard,
)
from flash_attn_ext.reference.dropout import Dropout
from flash_attn_ext.reference.memory import SlowMemory
from flash_attn_ext.reference.pipeline import Acquire, Issue, Pipeline, Ticket

pytestmark = pytest.mark.usefixtures("one_thread")


def make(kind, n_q=70, n_k=90, d=16, d_v=12):
    """Inputs of one head: q, k, v, mask, dout."""
    q, k, v = (torch.randn(n, size, dtype=torch.float64) for n, size in ((n_q, d), (n_k, d), (n_k, d_v)))
    mask, dead = None, [0, 3, n_q - 1] if n_q > 3 else [0]
    if kind == "large":  # scores of +-1e4: e^709 is the end of fp64
        q = q * 3000
    elif kind == "bool mask":
        mask = torch.rand(n_q, n_k) < 0.5
    elif kind == "-inf scores":
        mask = torch.randn(n_q, n_k, dtype=torch.float64).masked_fill(torch.rand(n_q, n_k) < 0.5, -math.inf)
    elif kind == "masked rows":  # some rows, the first and the last whole blocks of keys, and one whole block of rows
        mask = torch.rand(n_q, n_k) < 0.5
        mask[dead] = False
        mask[16:48] = False
        mask[:, :20] = False
        mask[:, -20:] = False
    elif kind == "masked rows, large":
        q = q * 3000
        mask = torch.zeros(n_q, n_k, dtype=torch.float64).masked_fill(torch.rand(n_q, n_k) < 0.5, -math.inf)
        mask[dead] = -math.inf
    return SimpleNamespace(q=q, k=k, v=v, mask=mask, dout=torch.randn(n_q, d_v, dtype=torch.float64))


KINDS = ["plain", "large", "bool mask", "-inf scores", "masked rows", "masked rows, large"]
kinds = pytest.mark.parametrize("kind", KINDS)


def dense(x, dropout=None, causal=None):
    """out, lse (N, 1) and the gradients, by autograd."""
    q, k, v = (t[None, None].requires_grad_() for t in (x.q, x.k, x.v))
    kept, p = None, 0.0
    if dropout:
        kept, p = dropout_mask(dropout.rng_state, 1, 1, x.q.shape[0], x.k.shape[0], dropout.p), dropout.p
    out, lse = reference.attention(q, k, v, x.mask, kept=kept, dropout_p=p, causal=causal)
    grads = torch.autograd.grad(out, (q, k, v), x.dout[None, None])
    return SimpleNamespace(out=out[0, 0].detach(), lse=lse[0, 0, :, None].detach(), grads=[g[0, 0] for g in grads])


def run_standard(x, dropout=None, M=None):
    out, saved = standard.forward(x.q, x.k, x.v, mask=x.mask, dropout=dropout, M=M)
    return out, None, standard.backward(x.q, x.k, x.v, x.dout, saved, dropout=dropout, M=M)


def run_flash1(x, dropout=None, M=1500):
    options = {"M": M, "mask": x.mask, "dropout": dropout}
    out, l, m = flash1.forward(x.q, x.k, x.v, **options)
    return out, m + l.log(), flash1.backward(x.q, x.k, x.v, out, x.dout, l, m, **options)


def run_block_sparse(x, dropout=None, M=1500, block_mask=None):
    """Without a block mask, all blocks are visible."""
    if block_mask is None:
        block_mask = torch.ones(block_sparse.grid(len(x.q), len(x.k), x.q.shape[1], M), dtype=torch.bool)
    options = {"block_mask": block_mask, "M": M, "mask": x.mask, "dropout": dropout}
    out, l, m = block_sparse.forward(x.q, x.k, x.v, **options)
    return out, m + l.log(), block_sparse.backward(x.q, x.k, x.v, out, x.dout, l, m, **options)


def run_flash2(x, dropout=None, causal=False, block_q=32, block_k=24):
    options = {"block_q": block_q, "block_k": block_k, "mask": x.mask, "dropout": dropout, "causal": causal}
    out, lse = flash2.forward(x.q, x.k, x.v, **options)
    return out, lse, flash2.backward(x.q, x.k, x.v, out, x.dout, lse, **options)


TRAINING = {
    "standard": run_standard,
    "standard, M = 300": lambda x, dropout=None: run_standard(x, dropout, 300),
    "flash1": run_flash1,
    "flash1, one block": lambda x, dropout=None: run_flash1(x, dropout, 10**6),
    "block-sparse, all blocks": run_block_sparse,
    "flash2": run_flash2,
    "flash2, blocks of 1 and 200": lambda x, dropout=None: run_flash2(x, dropout, False, 1, 200),
}
training = pytest.mark.parametrize("run", TRAINING.values(), ids=TRAINING)


def assert_equal_to_dense(x, expected, out, lse=None, grads=()):
    close = {"rtol": 1e-9, "atol": 1e-9 if x.q.abs().max() > 1000 else 1e-12}  # scores of 1e4 have an ulp of 2e-12
    torch.testing.assert_close(out, expected.out, **close)
    if lse is not None:
        torch.testing.assert_close(lse, expected.lse, **close)
    for ours, exact in zip(grads, expected.grads, strict=bool(grads)):
        scale = exact.abs().max().item()
        torch.testing.assert_close(ours, exact, rtol=1e-9, atol=close["atol"] * max(1, scale))


@kinds
@training
def test_forward_and_backward_equal_the_dense_oracle(run, kind):
    x = make(kind)
    assert_equal_to_dense(x, dense(x), *run(x))


@given(
    n_q=st.integers(1, 40), n_k=st.integers(1, 40), block_q=st.integers(1, 45), block_k=st.integers(1, 45),
    M=st.integers(1, 3000), visible=st.sampled_from([0.02, 0.5, 1.0]), seed=st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=40)
def test_any_sizes_and_blocks(n_q, n_k, block_q, block_k, M, visible, seed):
    torch.manual_seed(seed)
    x = make("plain", n_q, n_k, d=5, d_v=3)
    x.mask = torch.rand(n_q, n_k) < visible
    expected = dense(x)
    assert_equal_to_dense(x, expected, *run_standard(x, M=M))
    assert_equal_to_dense(x, expected, *run_flash1(x, M=M))
    assert_equal_to_dense(x, expected, *run_flash2(x, block_q=block_q, block_k=block_k))
    run = flash3_schedule.forward(x.q, x.k, x.v, mask=x.mask, block_q=block_q, block_k=block_k)
    assert_equal_to_dense(x, expected, run.out, run.lse)
    block_mask = torch.rand(block_sparse.grid(n_q, n_k, 5, M)) < visible
    expected = dense(with_block_mask(x, block_mask, M))
    assert_equal_to_dense(x, expected, *run_block_sparse(x, M=M, block_mask=block_mask))


@training
@pytest.mark.parametrize("p", [0.3, 1.0])
@pytest.mark.parametrize("kind", ["plain", "masked rows"])
def test_dropout_is_replayed_in_the_backward(run, kind, p):
    x, dropout = make(kind), Dropout(p, new_rng_state())
    assert_equal_to_dense(x, dense(x, dropout), *run(x, dropout=dropout))


def with_block_mask(x, block_mask, M):
    """The same inputs with one mask of elements, for the oracle. It hides a key that one of the two masks hides."""
    visible = block_sparse.expand_block_mask(block_mask, len(x.q), len(x.k), x.q.shape[1], M)
    if x.mask is None:
        mask = visible
    elif x.mask.dtype == torch.bool:
        mask = visible & x.mask
    else:
        mask = x.mask.masked_fill(~visible, -math.inf)
    return SimpleNamespace(**vars(x) | {"mask": mask})


@kinds
@pytest.mark.parametrize("block_mask_of", BLOCK_MASKS.values(), ids=BLOCK_MASKS)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_block_sparse_equals_the_dense_oracle(block_mask_of, kind, p):
    x, M = make(kind), 1500  # blocks of 16 queries and 24 keys
    block_mask, dropout = block_mask_of((5, 4)), Dropout(p, new_rng_state()) if p else None
    expected = dense(with_block_mask(x, block_mask, M), dropout)
    assert_equal_to_dense(x, expected, *run_block_sparse(x, dropout, M, block_mask))


def test_block_sparse_rows_and_keys_without_a_visible_block_give_zeros():
    x, block_mask = make("plain"), BLOCK_MASKS["a hidden row and column"]((5, 4))
    out, lse, (dq, dk, dv) = run_block_sparse(x, block_mask=block_mask)
    rows, keys = slice(16, 32), slice(48, 72)
    assert (lse[rows] == -math.inf).all()
    for hidden in (out[rows], dq[rows], dk[keys], dv[keys]):
        assert (hidden == 0).all()


def test_block_sparse_refuses_a_block_mask_of_another_shape_or_type():
    x, right = make("plain"), torch.ones(5, 4, dtype=torch.bool)
    for wrong, message in (
        (right.T, r"block_mask: got shape \(4, 5\); allowed: \(5, 4\), one element for each block"),
        (right.float(), "block_mask: got torch.float32; allowed: torch.bool"),
    ):
        with pytest.raises(ValueError, match=message):
            block_sparse.forward(x.q, x.k, x.v, wrong, M=1500)
        with pytest.raises(ValueError, match=message):
            block_sparse.backward(x.q, x.k, x.v, x.dout, x.dout, x.q, x.q, wrong, M=1500)
        with pytest.raises(ValueError, match=message):
            block_sparse.expand_block_mask(wrong, 70, 90, 16, 1500)


def test_dropout_is_the_operators_own():
    state = new_rng_state()
    expected = dropout_mask(state, 2, 3, 50, 37, 0.4)
    rows, cols = torch.arange(50)[:, None], torch.arange(37)[None, :]
    for b in range(2):
        for h in range(3):
            assert torch.equal(Dropout(0.4, state, head_index=b * 3 + h).kept(rows, cols), expected[b, h])


@pytest.mark.parametrize(("n_q", "n_k"), [(70, 70), (70, 90), (90, 70), (1, 5), (5, 1)])
def test_causal_flash2(n_q, n_k):
    x = make("plain", n_q, n_k)
    assert_equal_to_dense(x, dense(x, causal="upper_left"), *run_flash2(x, causal=True))


def test_causal_flash2_visits_about_half_of_the_tiles():
    q = torch.empty(1024, 64, device="meta")
    flops = []
    for causal in (False, True):
        memory = SlowMemory()
        flash2.forward(q, q, q, causal=causal, memory=memory)
        flops.append(memory.chip.matmul_flops)
    tiles = 1024 // 64
    assert flops[1] / flops[0] == tiles * (tiles + 1) / 2 / tiles**2


@pytest.mark.parametrize(("n_q", "n_k"), [(0, 5), (5, 0), (0, 0)])
@training
def test_empty(run, n_q, n_k):
    x = make("plain", n_q, n_k)
    out, lse, grads = run(x)
    assert out.shape == (n_q, 12)
    assert (out == 0).all()
    assert lse is None or (lse == -math.inf).all()
    assert all((g == 0).all() for g in grads)


@kinds
@pytest.mark.parametrize("schedule", flash3_schedule.SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2])
def test_flash3_schedules_compute_attention(schedule, stages, kind):
    x = make(kind)
    run = flash3_schedule.forward(x.q, x.k, x.v, mask=x.mask, schedule=schedule, stages=stages, block_q=32, block_k=24)
    assert_equal_to_dense(x, dense(x), run.out, run.lse)


@kinds
@pytest.mark.parametrize("n_q", [1, 3])
@pytest.mark.parametrize("num_splits", [1, 2, 5, 1000])
def test_decoding(kind, n_q, num_splits):
    x = make(kind, n_q=n_q)
    expected = dense(x)
    options = {"num_splits": num_splits, "block_k": 8, "mask": x.mask}
    assert_equal_to_dense(x, expected, *flash_decoding.decode(x.q, x.k, x.v, **options))
    plus_plus = flash_decoding_pp.decode(x.q, x.k, x.v, **options)
    assert_equal_to_dense(x, expected, plus_plus.out, plus_plus.lse)
    if kind in ("plain", "bool mask", "-inf scores", "masked rows"):
        assert not plus_plus.recomputed.any(), "a masked score must not look like one outside the range"


def test_unified_maximum_recomputes_exactly_the_rows_that_leave_the_range():
    x = make("plain", n_q=6)
    for row, factor in ((1, 1e5), (4, 1e6)):
        x.q[row] *= factor
    result = flash_decoding_pp.decode(x.q, x.k, x.v, num_splits=3, block_k=8)
    assert result.recomputed.flatten().tolist() == [False, True, False, False, True, False]
    assert_equal_to_dense(x, dense(x), result.out, result.lse)


@pytest.mark.parametrize("phi", [-300.0, 0.0, 300.0, 1e4])
def test_any_phi_gives_the_same_result(phi):
    """With phi near the scores nothing is computed again. With phi far away the second computation gives the result."""
    x = make("plain", n_q=4)
    result = flash_decoding_pp.decode(x.q, x.k, x.v, phi=phi, num_splits=3)
    assert_equal_to_dense(x, dense(x), result.out, result.lse)
    assert result.recomputed.all() == (phi == 1e4)


@pytest.mark.parametrize("m", [1, 3, 8, 9, 64])
@pytest.mark.parametrize("pad_to", [8, 64])
def test_flat_gemm(m, pad_to):
    x, weight = torch.randn(m, 100, dtype=torch.float64), torch.randn(100, 130, dtype=torch.float64)
    memory = SlowMemory()
    torch.testing.assert_close(flash_decoding_pp.flat_gemm(x, weight, pad_to=pad_to, memory=memory), x @ weight)
    assert memory.chip.matmul_flops == 2 * math.ceil(m / pad_to) * pad_to * 100 * 130
    assert memory.traffic["weight"].reads == 100 * 130


@pytest.mark.parametrize("function", [softmax.safe_softmax, softmax.online_softmax])
@pytest.mark.parametrize("block", [1, 7, 1000])
def test_softmax(function, block):
    x = torch.randn(6, 50, dtype=torch.float64)
    x[1] *= 1e5
    x[2, torch.rand(50) < 0.5] = -math.inf
    x[3, :20] = -math.inf
    expected = torch.softmax(x, 1)
    x[4], expected[4] = -math.inf, 0.0
    torch.testing.assert_close(function(x, block=block), expected, rtol=1e-12, atol=1e-15)


def test_naive_softmax_overflows_and_agrees_where_it_does_not():
    x = torch.randn(2, 50, dtype=torch.float64)
    torch.testing.assert_close(softmax.naive_softmax(x, block=7), torch.softmax(x, 1))
    assert softmax.naive_softmax(x * 1e5).isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@training
def test_the_chip_computes_16_bit_inputs_in_fp32(run, dtype):
    x = make("masked rows")
    exact = dense(x)
    for name in ("q", "k", "v", "dout"):
        setattr(x, name, getattr(x, name).to(dtype))
    out, _, grads = run(x)
    assert out.dtype == dtype
    for ours, expected in zip((out, *grads), (exact.out, *exact.grads), strict=True):
        error = (ours.double() - expected).abs().max() / expected.abs().max()
        assert error < {torch.float16: 5e-3, torch.bfloat16: 4e-2, torch.float32: 1e-5}[dtype]


def test_flash1_block_sizes_are_the_papers():
    assert flash1.block_sizes(65536, 64) == (256, 64)
    assert flash1.block_sizes(1, 64) == (1, 1)
    with pytest.raises(ValueError, match="M, d: got 0, 64"):
        flash1.block_sizes(0, 64)


@pytest.mark.parametrize(
    ("block_q", "block_k", "message"),
    [
        (0, 64, "block_q: got 0; allowed: an int, at least 1"),
        (64, -1, "block_k: got -1"),
        (64, 1.5, "block_k: got 1.5"),
        (256, 256, "block_q, block_k: got 256, 256; allowed: sizes whose Q, O, K and S tiles"),
    ],
)
def test_flash2_refuses_block_sizes_that_cannot_run(block_q, block_k, message):
    q = torch.empty(512, 64, device="meta")
    lse = torch.empty(512, 1, device="meta")
    with pytest.raises(ValueError, match=message):
        flash2.forward(q, q, q, block_q=block_q, block_k=block_k, memory=SlowMemory(32768))
    with pytest.raises(ValueError, match=message):
        flash2.backward(q, q, q, q, q, lse, block_q=block_q, block_k=block_k, memory=SlowMemory(32768))


def test_flash3_refuses_impossible_schedules():
    q, nothing = torch.zeros(4, 8), torch.zeros(0, 8)
    with pytest.raises(ValueError, match="q, k: got 4 queries, 0 keys"):
        flash3_schedule.forward(q, nothing, nothing)
    with pytest.raises(ValueError, match="schedule: got 'fast'; allowed: serial, overlap, ping-pong, both"):
        flash3_schedule.forward(q, q, q, schedule="fast")


class TestPipeline:
    def test_a_result_is_sealed_until_the_wait(self):
        ticket = Ticket("QK 0", 10.0, "S")
        with pytest.raises(RuntimeError, match="QK 0: used before the wait"):
            _ = ticket.value

    def test_a_deadlock_is_reported(self):
        def process():
            yield Acquire("never released")

        with pytest.raises(RuntimeError, match="deadlock: one waits for never released"):
            Pipeline({}).run({"one": process()})

    def test_a_unit_does_one_task_at_a_time_in_the_order_of_issue(self):
        done = [0.0]

        def process(clocks):
            for n in range(3):
                yield Issue("unit", str(n), lambda: done.__setitem__(0, done[0] + clocks))

        pipeline = Pipeline({"unit": lambda: done[0]})
        pipeline.run({"a": process(5), "b": process(7)})
        ends = [0.0, *(i.end for i in pipeline.timeline)]
        assert [i.start for i in pipeline.timeline] == ends[:-1]
        assert ends[-1] == 36

    def test_no_unit_does_two_tasks_at_once_and_no_task_is_missing(self):
        x = make("plain", 64, 96)
        for schedule, (warpgroups, _) in flash3_schedule.SCHEDULES.items():
            run = flash3_schedule.forward(x.q, x.k, x.v, schedule=schedule, block_q=32, block_k=24)
            for unit in (flash3_schedule.TENSOR_CORES, flash3_schedule.EXP_UNITS, flash3_schedule.LOADS):
                tasks = sorted((i.start, i.end) for i in run.timeline if i.unit == unit)
                assert all(a[1] <= b[0] for a, b in pairwise(tasks))
            labels = [i.label for i in run.timeline]
            for task in ("QK", "PV", "softmax"):
                for j in range(4):
                    assert labels.count(f"{task} {j}") == 2 * warpgroups

    def test_each_overlap_saves_time_and_the_bound_is_the_tensor_cores(self):
        """At the H100's rates and D = 128 a softmax takes half as long as its two GEMMs."""
        q, k = (torch.empty(n, 128, dtype=torch.float16, device="meta") for n in (128, 8192))
        runs = {name: flash3_schedule.forward(q, k, k, schedule=name) for name in flash3_schedule.SCHEDULES}
        gemm_clocks = 4 * 128 * 8192 * 128 / flash3_schedule.Rates().tensor_flops
        assert runs["serial"].clocks == pytest.approx(1.5 * gemm_clocks, rel=0.02)
        order = [runs[name].clocks for name in ("serial", "overlap", "ping-pong", "both")]
        assert order == sorted(order, reverse=True)
        assert runs["both"].busy(flash3_schedule.TENSOR_CORES) > 0.99
        assert all(run.clocks >= gemm_clocks for run in runs.values())
