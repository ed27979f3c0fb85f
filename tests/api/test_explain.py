"""explain: its report agrees with the call that follows, and it computes nothing."""

import re

import pytest
import test_errors
import torch
from helpers import allocated_by, make_qkv
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_attn_ext import _ops, active_kernel, available_kernels, explain, flash_attn, force_kernel
from flash_attn_ext.iomodel.calls import Cost, pass_cost
from flash_attn_ext.iomodel.counts import Problem
from flash_attn_ext.reference import flash2
from flash_attn_ext.reference.memory import SlowMemory


@pytest.fixture
def kernels():
    """The CPU chooses the kernels again after the test."""
    yield force_kernel
    force_kernel(None)


def strided(t):
    return torch.stack([t.detach(), t.detach()], -1)[..., 0].requires_grad_(t.requires_grad)


def call(*shape, **options):
    """Positional and keyword arguments of one call."""
    names = ("heads_kv", "dtype")
    qkv = make_qkv(*shape, **{name: options.pop(name) for name in names if name in options})
    return qkv, {"enable_gqa": True, **options}


def leaf(*shape, dtype=torch.float32):
    return torch.rand(shape, dtype=dtype).requires_grad_()


CALLS = {
    "plain": lambda: call(2, 4, 300, 200, 64),
    "large": lambda: call(1, 8, 1024, 1024, 64, is_causal=True),
    "one head": lambda: call(1, 1, 700, 900, 48, 80),
    "shared keys": lambda: call(2, 8, 130, 400, 64, heads_kv=2, causal="lower_right"),
    "bfloat16": lambda: call(2, 4, 300, 200, 64, dtype=torch.bfloat16),
    "float64": lambda: call(2, 4, 300, 200, 64, dtype=torch.float64, window=40),
    "decode": lambda: call(2, 16, 1, 5000, 128, heads_kv=2),
    "decode on request": lambda: call(1, 2, 200, 3000, 64, num_splits=3),
    "on the stack": lambda: call(1, 1, 4, 5, 8),
    "mask": lambda: call(2, 4, 300, 200, 64, attn_mask=leaf(1, 4, 300, 200)),
    "slopes": lambda: call(2, 4, 300, 200, 64, alibi_slopes=leaf(4)),
    "slopes of a batch": lambda: call(2, 4, 300, 200, 64, alibi_slopes=leaf(2, 4)),
    "half slopes": lambda: call(2, 4, 300, 200, 64, dtype=torch.float16, alibi_slopes=leaf(4, dtype=torch.float16)),
    "dropout": lambda: call(2, 4, 300, 200, 64, dropout_p=0.2),
    "no query": lambda: call(2, 4, 0, 200, 64),
    "no key": lambda: call(2, 4, 30, 0, 64),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("count", [1, 2])
def test_reported_memory_equals_allocated_memory(name, count, threads):
    threads(count)
    qkv, options = CALLS[name]()
    explanation = explain(*qkv, **options)
    forward, out = allocated_by(lambda: flash_attn(*qkv, **options))
    assert explanation.forward.allocated_bytes == forward

    inputs = [*qkv, options.get("attn_mask"), options.get("alibi_slopes")]
    grad = torch.ones_like(out)
    backward, _ = allocated_by(lambda: torch.autograd.grad(out, [t for t in inputs if t is not None], grad))
    assert explanation.backward.allocated_bytes == backward


def test_memory_of_copies(threads):
    """explain names the tensors that a call copies: to read them, to make them 4-D, or for autocast."""
    threads(1)
    q, k, v = (strided(t) for t in make_qkv(2, 4, 300, 200, 64))
    for tensors in [(q, k, v), (q[0], k[0], v[0]), (q[:, None], k[:, None], v[None])]:
        said = explain(*tensors).forward
        assert said.allocates["copies"] > 0
        assert said.allocated_bytes == allocated_by(lambda tensors=tensors: flash_attn(*tensors))[0]
    q, k, v = (t.detach() for t in make_qkv(2, 4, 300, 200, 64))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        said = explain(q, k, v).forward
        assert said.allocates["copies"] == 2 * 4 * 700 * 64 * 2
        assert said.allocated_bytes == allocated_by(lambda: flash_attn(q, k, v))[0]


def test_only_wanted_gradients():
    q, k, v = (t.detach() for t in make_qkv(1, 2, 100, 100, 256))
    assert explain(q, k, v).gradients == ("query", "key", "value")
    only = explain(q, k.requires_grad_(), v)
    assert only.gradients == ("key",)
    assert {name for name, count in only.backward.allocates.items() if count} == {"dkey", "workspace"}


def test_it_runs_nothing():
    q, k, v = make_qkv(1, 2, 2000, 2000, 64)
    calls, generator = _ops._C.kernel_calls(), torch.get_rng_state()
    nbytes, explanation = allocated_by(lambda: explain(q, k, v, dropout_p=0.5, is_causal=True))
    assert _ops._C.kernel_calls() == calls
    assert torch.equal(torch.get_rng_state(), generator)
    assert explanation.forward.allocated_bytes > q.nbytes > 1000 * nbytes


def test_reported_kernels_run(kernels):
    available = available_kernels()
    for isa in available:
        kernels(isa)
        explanation = explain(*make_qkv(1, 2, 100, 100, 16))
        for which in (explanation.forward, explanation.backward):
            assert (which.kernel, which.splits, which.error) == (isa, 0, None)
        faster = reversed(available[available.index(isa) + 1 :])
        forced = [f"{name}: {isa} is forced" for name in faster]
        reasons = [r for r in explanation.backward.why_not if not r.endswith("this CPU cannot run it")]
        assert reasons == forced
        assert explanation.forward.why_not[:-1] == explanation.backward.why_not
        assert re.fullmatch("decode: for at most 8 queries, or .*asks for it", explanation.forward.why_not[-1])


@pytest.mark.parametrize(
    ("seqlen_q", "options", "decodes"),
    [(8, {}, True), (32, {}, True), (33, {}, False), (33, {"num_splits": 2}, True), (33, {"unified_max": 1.0}, True)],
)
def test_the_decode_kernel(seqlen_q, options, decodes):
    forward = explain(*make_qkv(1, 1, seqlen_q, 8192, 16), **options).forward
    assert (forward.splits > 0) == decodes
    assert any("decode" in reason for reason in forward.why_not) != decodes
    if "num_splits" in options:
        assert forward.splits == 2
    if decodes:
        assert f"decode kernel, {forward.splits} split" in str(forward)


@pytest.mark.parametrize("name", test_errors.BAD_CALLS)
def test_bad_arguments_give_the_errors_of_flash_attn(name):
    changed, exception, words = test_errors.BAD_CALLS[name]
    with pytest.raises(exception, match=".*".join(re.escape(w) for w in words)):
        explain(**test_errors.qkv(**changed))


@pytest.mark.parametrize(
    "wrong", [{"scale": "x"}, {"softcap": "x"}, {"is_causal": "yes"}, {"deterministic": "yes"}, {"num_splits": 1.5}]
)
def test_wrong_types_give_the_errors_of_flash_attn(wrong):
    arguments = test_errors.qkv()
    with pytest.raises((TypeError, RuntimeError)) as theirs:
        flash_attn(**arguments, **wrong)
    with pytest.raises(type(theirs.value)) as ours:
        explain(**arguments, **wrong)
    assert str(ours.value).splitlines()[0] == str(theirs.value).splitlines()[0]


def test_devices_without_kernels():
    with FakeTensorMode():
        q = torch.empty(1, 2, 10, 16, device="xpu")
    with pytest.raises(NotImplementedError, match="no kernel for device xpu:0; allowed: cpu, cuda"):
        explain(q, q, q)
    if not _ops._C.build_info()["cuda"]:
        with FakeTensorMode():  # tensors of a device that is not here
            q = torch.empty(1, 2, 10, 16, device="cuda")
        with pytest.raises(NotImplementedError, match="this build has no CUDA half; install it again with"):
            explain(q, q, q)


def test_printed(one_thread):  # the workspace is by threads
    q, k, v = make_qkv(1, 2, 1000, 1000, 64, dtype=torch.bfloat16)
    text = str(explain(q, k, v))
    assert text.startswith("flash_attn of query (1, 2, 1000, 64), key (1, 2, 1000, 64), value (1, 2, 1000, 64), bfloat")
    assert f"\nforward: {active_kernel()}\n" in text
    assert "\nbackward of query, key, value: " in text
    # Kernels without a product of bfloat16 operands also allocate a workspace.
    assert re.search(r"\n  allocates \d{3}(\.\d)? KiB: out 250 KiB, lse 7\.812 KiB(, workspace [\d.]+ KiB)?\n", text)
    assert "predicted, in tiles of 48 x 64: " in text
    empty = explain(q[:, :, :0], k, v)
    assert empty.forward.kernel is None
    assert "forward: no kernel, there is nothing to compute" in str(empty)


class TestPrediction:
    """iomodel.calls, from a few tiles, against the reference that walks all of them."""

    BLOCKS = ((48, 64), (64, 64), (16, 80))

    @staticmethod
    def walked(which, problem, blocks, causal=False):
        q, k, v, dout = problem.tensors(4)
        memory = SlowMemory()
        lse = torch.empty(problem.S, 1, device="meta")
        options = {"block_q": blocks[0], "block_k": blocks[1], "memory": memory, "causal": causal}
        if which == "forward":
            flash2.forward(q, k, v, **options)
        else:
            flash2.backward(q, k, v, dout, dout, lse, **options)
        return Cost(memory.flops * problem.heads, memory.bytes * problem.heads)

    @pytest.mark.parametrize("which", ["forward", "backward"])
    @pytest.mark.parametrize("blocks", BLOCKS)
    @pytest.mark.parametrize("lengths", [(1, 1), (1, 700), (333, 500), (960, 40), (95, 129)])
    def test_every_length(self, which, blocks, lengths):
        problem = Problem(2, 3, lengths[0], 32, "float32", S_k=lengths[1], D_v=40)
        assert pass_cost(which, problem, blocks) == self.walked(which, problem, blocks)

    @pytest.mark.parametrize("which", ["forward", "backward"])
    def test_a_band(self, which):
        """Causal, in tiles that the diagonal does not shorten. The reference skips hidden tiles."""
        problem = Problem(1, 2, 960, 32, "float32")
        blocks = (64, 32)
        visible = sum((i + 64) // 32 for i in range(0, 960, 64))
        assert pass_cost(which, problem, blocks, visible) == self.walked(which, problem, blocks, causal=True)

    def test_explain_counts_the_visible_tiles(self):
        q, k, v = make_qkv(2, 2, 960, 960, 64)
        full, causal, window = (explain(q, k, v, **o).forward for o in ({}, {"is_causal": True}, {"window": (64, 0)}))
        assert causal.tiles == full.tiles == (48, 64)
        problem = Problem(2, 2, 960, 64, "float32")
        expected = self.walked("forward", problem, (48, 64), causal=True)
        for ours, theirs in ((causal.flops, expected.flops), (causal.traffic, expected.bytes)):
            assert theirs < ours < 1.06 * theirs  # the reference cuts a tile short on the diagonal
        assert window.flops < causal.flops / 3
        hidden = torch.ones(1, 1, 1, 960, dtype=torch.bool).expand(2, 2, 960, 960)
        assert explain(q, k, v, hidden).forward.traffic == full.traffic + 960

    def test_decoding_reads_shared_keys_once(self):
        q, k, v = (t.detach() for t in make_qkv(1, 8, 1, 4096, 64, heads_kv=2))
        forward = explain(q, k, v, enable_gqa=True).forward
        read = k.nbytes + v.nbytes + q.nbytes
        assert read < forward.traffic < 1.01 * read
        assert forward.flops > 4 * 8 * 4096 * 64
