"""Tests that need a GPU: graphs, streams, tiers, the memory of a call.

`make gpu` runs it with a time-out for each case, and with it the tests of tests/api that are marked ``any_device``.
"""

import re

import pytest
import torch
from helpers import check_against_reference, check_jvp_against_reference, gradients, leaves, make_qkv

import flash_attn_ext
from flash_attn_ext import dropout_mask, flash_attn, new_rng_state

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))

# Blocks of 128 and 192 queries, tiles of 64, 80, 112 and 128 keys.
EDGES = [(17, 1), (63, 79), (64, 80), (65, 81), (127, 127), (128, 128), (129, 113), (191, 255), (193, 257), (400, 1000)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
)
@pytest.mark.parametrize("causal", [None, "upper_left", "lower_right"])
def test_tile_edges_of_the_tensor_cores(dtype, head_dim, head_dim_v, causal):
    for seqlen_q, seqlen_k in EDGES:
        shape = (1, 2, seqlen_q, seqlen_k, head_dim)
        check_against_reference(*make_qkv(*shape, heads_kv=1, head_dim_v=head_dim_v, dtype=dtype), causal=causal)


@dtypes
@pytest.mark.parametrize("head_dim", [24, 64, 128, 136])
def test_forward_mode(dtype, head_dim):
    """Each tier that can runs the call. sm80: 16 bits, head dimensions up to 128, tiles of 128 queries by 64 or 32
    keys.
    """
    for seqlen_q, seqlen_k in EDGES[:-1]:
        inputs = [t.detach() for t in make_qkv(1, 2, seqlen_q, seqlen_k, head_dim, heads_kv=1, dtype=dtype)]
        check_jvp_against_reference(inputs, causal="lower_right")
        mask = torch.randn(1, 2, seqlen_q, seqlen_k).masked_fill(torch.rand(seqlen_q, seqlen_k) < 0.2, -torch.inf)
        inputs += [t.to(dtype) for t in (mask, torch.rand(2), torch.randn(2))]
        check_jvp_against_reference(inputs, window=(100, 30), softcap=5.0, dropout_p=0.2)


@dtypes
def test_a_long_sequence(dtype):
    check_against_reference(*make_qkv(1, 4, 2000, 2100, 64, heads_kv=2, dtype=dtype), causal="lower_right")


@dtypes
@pytest.mark.parametrize("seqlen_k", [63, 1000, 8200])
def test_decoding(dtype, seqlen_k):
    check_against_reference(*make_qkv(2, 8, 1, seqlen_k, 64, heads_kv=2, dtype=dtype))


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_the_dropout_mask_is_that_of_the_cpu(dropout_p):
    state = new_rng_state()
    arguments = (2, 3, 130, 257, dropout_p)
    assert torch.equal(dropout_mask(state, *arguments).cpu(), dropout_mask(state.cpu(), *arguments))


def everything(dtype):
    """Inputs and options that reach every gradient, with results that can be compared bit by bit."""
    q, k, v = make_qkv(2, 4, 300, 333, 64, heads_kv=2, dtype=dtype)
    mask = torch.randn(1, 4, 1, 333, dtype=dtype).requires_grad_()
    slopes = torch.rand(4, dtype=dtype).requires_grad_()
    options = {"causal": "lower_right", "dropout_p": 0.2, "rng_state": new_rng_state(), "deterministic": True}
    return [q, k, v, mask, slopes], options


def run(inputs, options):
    inputs = leaves(inputs)
    outputs = flash_attn(*inputs[:4], alibi_slopes=inputs[4], enable_gqa=True, return_lse=True, **options)
    return [*outputs, *gradients(outputs, inputs, [torch.ones_like(o) for o in outputs])]


@dtypes
def test_two_runs_are_bitwise_equal(dtype):
    inputs, options = everything(dtype)
    first = run(inputs, options)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, run(inputs, options), strict=True))


@dtypes
def test_a_plain_call_is_bitwise_repeatable(dtype):
    """A call without options that only some tiers take."""
    q, k, v = make_qkv(2, 4, 300, 333, 64, heads_kv=2, dtype=dtype)
    first, second = (run([q, k, v, None, None], {"is_causal": True, "deterministic": True}) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def captured(step):
    """The graph of step(), after a warm-up on another stream, and the tensors that a replay writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


@dtypes
def test_a_graph_replays_with_new_inputs(dtype):
    q, k, v = make_qkv(2, 2, 130, 150, 64, dtype=dtype)
    grad = torch.randn(2, 2, 130, 64, dtype=dtype)

    def step():
        out = flash_attn(q, k, v, is_causal=True, deterministic=True)
        return [out, *torch.autograd.grad(out, (q, k, v), grad)]

    graph, results = captured(step)
    for _ in range(2):
        with torch.no_grad():
            for t in (q, k, v):
                t.normal_()
        graph.replay()
        replayed = [t.clone() for t in results]
        assert all(torch.equal(a, b) for a, b in zip(replayed, step(), strict=True))


def test_a_graph_draws_a_fresh_dropout_mask_at_each_replay():
    q, k, v = make_qkv(2, 2, 130, 150, 64)
    grad = torch.randn(2, 2, 130, 64)

    def step(state):
        out = flash_attn(q, k, v, dropout_p=0.3, rng_state=state, deterministic=True)
        return [state, out, *torch.autograd.grad(out, (q, k, v), grad)]

    graph, results = captured(lambda: step(new_rng_state()))
    replays = []
    for _ in range(3):
        graph.replay()
        replays.append([t.clone() for t in results])
    for n, replay in enumerate(replays):
        assert all(torch.equal(a, b) for a, b in zip(replay, step(replay[0]), strict=True)), (
            "forward and backward agree"
        )
        assert not any(torch.equal(replay[1], other[1]) for other in replays[n + 1 :])


def test_dropout_without_a_state_can_be_captured():
    q, k, v = (t.detach() for t in make_qkv(1, 2, 130, 150, 64))
    graph, out = captured(lambda: flash_attn(q, k, v, dropout_p=0.3))
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out)


def test_another_stream_than_the_default():
    """The call reads data that this stream has not written yet."""
    q, k, v = make_qkv(2, 2, 130, 150, 64)
    new = torch.randn_like(q)
    grad = torch.randn(2, 2, 130, 64)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        with torch.no_grad():
            q.copy_(new)
        out = flash_attn(q, k, v, deterministic=True)
        grads = torch.autograd.grad(out, (q, k, v), grad)
    torch.cuda.synchronize()
    expected = flash_attn(q, k, v, deterministic=True)
    assert torch.equal(out, expected)
    for a, b in zip(grads, torch.autograd.grad(expected, (q, k, v), grad), strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
@dtypes
def test_a_second_device(dtype):
    """That is not the current one."""
    inputs, options = everything(dtype)
    expected = run(inputs, options)
    on_second = [t.detach().to("cuda:1").requires_grad_() for t in inputs]
    results = run(on_second, options | {"rng_state": options["rng_state"].to("cuda:1")})
    for a, b in zip(expected, results, strict=True):
        assert b.device == torch.device("cuda:1")
        torch.testing.assert_close(a, b.to(a.device))


@pytest.mark.skipif(torch.__version__ < "2.12", reason="needs torch 2.12: Dynamo of 2.11 does not trace locals()")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(device, dynamic):
    torch.set_default_device(None)

    def step(q, k, v, slopes):
        out, lse = flash_attn(q, k, v, causal="lower_right", softcap=5.0, alibi_slopes=slopes, return_lse=True)
        return (out * 2).sum() + lse.cos().sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    for length in (33, 57):
        shapes = [(2, 3, length, 16), (2, 3, length + 5, 16), (2, 3, length + 5, 16), (3,)]
        inputs = [torch.rand(shape, device=device, requires_grad=True) for shape in shapes]
        expected = torch.autograd.grad(step(*inputs), inputs)
        for a, b in zip(torch.autograd.grad(compiled(*inputs), inputs), expected, strict=True):
            torch.testing.assert_close(a, b)


@dtypes
def test_nothing_waits_for_the_gpu(dtype):
    inputs, options = everything(dtype)
    run(inputs, options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(inputs, options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


class TestTiers:
    """Each forced tier, and explain's answer."""

    @pytest.fixture(params=["simt", "sm80", "sm90"])
    def tier(self, request):
        flash_attn_ext.force_cuda_tier(request.param)
        yield request.param
        flash_attn_ext.force_cuda_tier(None)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
    def test_a_forced_tier_runs_or_says_why_not(self, tier, dtype):
        q, k, v = make_qkv(2, 4, 300, 333, 64, heads_kv=2, dtype=dtype)
        explained = flash_attn_ext.explain(q, k, v, is_causal=True, enable_gqa=True)
        call = lambda: flash_attn(q, k, v, is_causal=True, enable_gqa=True)  # noqa: E731
        out = self.runs_or_raises(tier, explained.forward, call)
        if out is not None:
            self.runs_or_raises(tier, explained.backward, lambda: torch.autograd.grad(out.sum(), (q, k, v)))

    @staticmethod
    def runs_or_raises(tier, explained, action):
        """The call runs as explained. Returns the action's result, if there is one."""
        if explained.error is None:
            assert explained.kernel == tier
            return action()
        assert f"{tier}: " in explained.error
        assert explained.error.endswith(f"({tier} is forced)")
        with pytest.raises(NotImplementedError, match=re.escape(explained.error)):
            action()
        return None

    @dtypes
    def test_reported_memory_equals_allocated_memory(self, dtype):
        q, k, v = make_qkv(2, 4, 300, 333, 64, dtype=dtype)

        def requested(action):
            before = torch.cuda.memory_stats()["requested_bytes.all.allocated"]
            result = action()
            return torch.cuda.memory_stats()["requested_bytes.all.allocated"] - before, result

        explained = flash_attn_ext.explain(q, k, v)
        forward, out = requested(lambda: flash_attn(q, k, v))
        grad = torch.ones_like(out)
        backward, _ = requested(lambda: torch.autograd.grad(out, (q, k, v), grad))
        assert (explained.forward.allocated_bytes, explained.backward.allocated_bytes) == (forward, backward)


def test_no_memory_grows_with_the_square_of_the_length():
    length = 8192
    q, k, v = make_qkv(1, 1, length, length, 64, dtype=torch.bfloat16)
    step = lambda: torch.autograd.grad(flash_attn(q, k, v).sum(), (q, k, v))  # noqa: E731
    step()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    assert torch.cuda.max_memory_allocated() - before < length * length * 2 / 8


def test_an_error_on_the_device_is_not_left_behind():
    """A refused call does not change the next call."""
    q, k, v = make_qkv(1, 2, 20, 20, 16)
    with pytest.raises((TypeError, ValueError)):
        flash_attn(q, k.cpu(), v)
    check_against_reference(q, k, v)
