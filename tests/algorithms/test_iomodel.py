"""flash_attn_ext.iomodel: the calculator against the reference's counts, the published table, the kernel's source."""

import json
import re
from dataclasses import replace

import pytest
import torch
from block_masks import BLOCK_MASKS
from paths import ROOT

from flash_attn_ext.iomodel import __main__ as cli
from flash_attn_ext.iomodel import calls, counts, devices, gpt2, roofline, sweeps
from flash_attn_ext.iomodel.counts import Problem, count
from flash_attn_ext.reference import block_sparse, flash2
from flash_attn_ext.reference.memory import SlowMemory

SMALL = Problem(B=2, H=3, S=256, D=32)


def test_the_kernels_tiles_equal_the_tiles_of_the_source():
    source = (ROOT / "csrc/cpu/kernels/tiling-inl.h").read_text()
    for name, tiles in counts.kernel_tiles().items():
        (body,) = re.findall(rf"constexpr Tiling {name}_tiling\(\) \{{(.*?)\n\}}", source, re.DOTALL)
        returned = re.findall(r"return \{(\d+), (\d+)\};", body)
        assert [tuple(map(int, pair)) for pair in returned] == [tiles]


@pytest.mark.parametrize("algorithm", counts.ALGORITHMS)
def test_heads_multiply_everything_but_the_mask(algorithm):
    one, many = (count(algorithm, replace(SMALL, B=b, H=h), 8192) for b, h in ((1, 1), (2, 3)))
    assert many.flops == 6 * one.flops
    assert many.bytes == 6 * one.bytes
    assert many.extra_bytes == 6 * one.extra_bytes
    assert many.chip_peak == one.chip_peak
    masked = count(algorithm, replace(SMALL, mask=True), 8192)
    passes = 1 if algorithm == "standard" else 2  # the standard backward does not need the mask
    rounds = masked.traffic["forward", "mask"][0] // (256 * 256 * 2)
    assert rounds == 1, "a mask is read once in a pass, and is the same for all heads"
    assert (
        sum(accessed[0] for (_, tensor), accessed in masked.traffic.items() if tensor == "mask")
        == passes * 256 * 256 * 2
    )


def test_counts_equal_the_reference_s():
    counted = count("flash2", replace(SMALL, B=1, H=1, backward=False), 0, (64, 32))
    memory = SlowMemory()
    flash2.forward(*SMALL.tensors(3), block_q=64, block_k=32, memory=memory)
    assert (counted.bytes, counted.accesses, counted.flops) == (memory.bytes, memory.accesses, memory.flops)
    assert counted.tiles == "64 x 32"


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("block_mask_of", BLOCK_MASKS.values(), ids=BLOCK_MASKS)
def test_block_sparse_counts_equal_the_reference_s(block_mask_of, backward):
    """The closed forms of these counts are in test_io_counts.py."""
    problem, M = Problem(2, 3, 200, 32, backward=backward, S_k=170, D_v=40), 4000
    block_mask = block_mask_of(block_sparse.grid(200, 170, 32, M))
    counted = count("block_sparse", problem, M, block_mask=block_mask)
    memories = forward, second = SlowMemory(), SlowMemory()
    q, k, v, dout = (torch.randn(t.shape).to(t.dtype) for t in problem.tensors(4))
    out, *sums_and_maxima = block_sparse.forward(q, k, v, block_mask, M=M, memory=forward)
    if backward:
        block_sparse.backward(q, k, v, out, dout, *sums_and_maxima, block_mask, M=M, memory=second)
    for attribute in ("bytes", "accesses", "flops", "extra_bytes"):
        assert getattr(counted, attribute) == 6 * sum(getattr(memory, attribute) for memory in memories)
    assert counted.traffic == {
        (name, tensor): (6 * t.reads * t.itemsize, 6 * t.writes * t.itemsize)
        for name, memory in zip(("forward", "backward"), memories, strict=True)
        for tensor, t in memory.traffic.items()
    }


@pytest.mark.parametrize("visible", [0.0, 0.3, 0.5, 1.0])
def test_the_visible_share_of_a_problem_is_the_share_of_computed_blocks(visible):
    """N is a multiple of the blocks, so that the counts do not depend on which blocks are visible."""
    N, d, M = 512, 32, 4096
    shape = block_sparse.grid(N, N, d, M)
    block_mask = counts.spread_blocks(visible, shape)
    blocks = shape[0] * shape[1]
    assert (shape, int(block_mask.sum())) == ((16, 16), round(visible * blocks))
    first = torch.zeros(shape, dtype=torch.bool)
    first.view(-1)[: round(visible * blocks)] = True
    problem = Problem(1, 1, N, d, visible=visible)
    counted, at_the_start, all_blocks = (
        count("block_sparse", problem, M),
        count("block_sparse", problem, M, block_mask=first),
        count("flash1", problem, M),
    )
    assert counted == at_the_start
    assert counted.flops * blocks == all_blocks.flops * round(visible * blocks)
    if visible == 1:
        assert counted == all_blocks
    for dense in ("standard", "flash2", "ours"):
        assert count(dense, problem, M) == count(dense, replace(problem, visible=1.0), M)


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("blocks", calls.CANDIDATES, ids=str)
@pytest.mark.parametrize("D", [32, 128])
def test_on_chip_memory_of_tiles_equals_the_reference_s(D, blocks, which):
    q, k, v, dout = Problem(1, 1, 3 * max(blocks), D).tensors(4)
    memory, sizes = SlowMemory(), {"block_q": blocks[0], "block_k": blocks[1]}
    if which == "forward":
        flash2.forward(q, k, v, memory=memory, **sizes)
    else:
        flash2.backward(q, k, v, q, dout, torch.empty(len(q), 1, device="meta"), memory=memory, **sizes)
    assert calls.chip_peak(which, D, blocks) == memory.chip.peak


@pytest.mark.parametrize("M", [1000, 8192, 65536])
@pytest.mark.parametrize("D", [32, 64, 128])
def test_chosen_blocks_fit_the_chip(D, M):
    result = count("flash2", replace(SMALL, D=D), M)
    assert 0 < result.chip_peak <= M


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_counts_of_a_call_equal_the_algorithm_s(dtype, dropout):
    """calls.py adds up the costs that counts.py counts. tests/api/test_explain.py tests it for any two lengths."""
    problem = Problem(2, 3, 200, 32, dtype, dropout=dropout, S_k=130, D_v=40)
    both, forward = (count("flash2", replace(problem, backward=b), 0, (64, 48)) for b in (True, False))
    passes = [calls.pass_cost(which, problem, (64, 48)) for which in ("forward", "backward")]
    assert (passes[0].flops, passes[0].bytes) == (forward.flops, forward.bytes)
    total = passes[0] + passes[1]
    assert (total.flops, total.bytes) == (both.flops, both.bytes)


def test_a_chip_without_room_for_one_row_is_refused():
    with pytest.raises(ValueError, match="M: got 100 elements"):
        count("flash2", SMALL, 100)
    with pytest.raises(ValueError, match="algorithm: got 'flash9'"):
        count("flash9", SMALL, 8192)


class TestThePublishedTable:
    """FlashAttention (2022), figure 2 left: 66.6 / 75.2 GFLOP, 40.3 / 4.4 GB, 41.7 / 7.3 ms."""

    def test_gigabytes_within_5_percent(self):
        steps = [s for s in gpt2.traffic_steps() if s.published is not None]
        assert [s.published for s in steps] == [40.3, 4.4]
        for step in steps:
            assert step.ratio == pytest.approx(1, abs=0.05)

    def test_as_printed_flash_attention_moves_more_than_published(self):
        """The difference that the steps explain must exist."""
        printed = gpt2.counted()["flash1"].bytes / 1e9
        assert 1.2 * 4.4 < printed < 1.3 * 4.4

    def test_gflop_are_a_sixteenth_of_the_products_and_the_rest_within_5_percent(self):
        steps = [s for s in gpt2.flop_steps() if s.published is not None]
        assert len(steps) == 3
        for step in steps:
            assert step.ratio == pytest.approx(1, abs=0.05)

    def test_the_published_gflop_cannot_count_all_heads(self):
        one_product = 2 * 1024 * 1024 * 64 * 64 * 16
        assert one_product > 75.2e9
        assert gpt2.counted()["standard"].matmul_flops == 6 * one_product
        assert gpt2.counted()["flash1"].matmul_flops == 7 * one_product

    def test_the_roofline_is_below_the_measurement(self):
        for _, published, _, milliseconds in gpt2.comparison():
            assert 0.4 * published.milliseconds < milliseconds < published.milliseconds


def test_with_a_perfect_cache_each_tensor_moves_once():
    """FlashAttention-2 loads K and V for every block of queries.

    FlashAttention-1 loads Q and O for every block of keys.
    """
    problem = replace(SMALL, B=1, H=1, backward=False)
    q, _, _ = problem.tensors(3)
    flash1, flash2_ = (count(name, problem, 8192, (64, 64)) for name in ("flash1", "flash2"))
    statistics = 4 * problem.S  # lse; FlashAttention-1 reads and writes l, m and O
    assert flash2_.bytes_once == 4 * q.nbytes + statistics < flash2_.bytes
    assert flash1.bytes_once == 5 * q.nbytes + 4 * statistics < flash1.bytes


def test_flash2_is_not_predicted_slower_than_flash1_where_a_cache_serves_it():
    """On an A100 the model's FlashAttention-2 moves twice as much as its FlashAttention-1; most of it through L2."""
    problem, device = Problem(64, 16, 1024, 64), devices.find("A100-40GB")
    times = [
        roofline.predict(count(a, problem, device.elements("float16")), device, "float16") for a in ("flash1", "flash2")
    ]
    assert times[1].seconds > 1.8 * times[0].seconds
    assert times[1].least_seconds < times[0].least_seconds <= times[0].seconds


def test_roofline():
    device = devices.Device("d", {"float32": 100.0}, 10.0, 4.0, 1024, "a test")
    work = counts.Counts("", matmul_flops=200, other_flops=10, bytes=8, bytes_once=4)
    prediction = roofline.predict(work, device, "float32")
    assert (prediction.compute_seconds, prediction.memory_seconds) == (3.0, 2.0)
    assert (prediction.seconds, prediction.bound) == (3.0, "compute")
    prediction = roofline.predict(replace(work, bytes=16), device, "float32")
    assert (prediction.seconds, prediction.bound, prediction.least_seconds) == (4.0, "memory", 3.0)
    prediction = roofline.predict(replace(work, bytes=16, bytes_once=15), device, "float32")
    assert prediction.least_seconds == 3.75


def test_devices():
    assert devices.find("A100-40GB").elements("float16") == 164 * 1024 // 2
    given = devices.find("H100", matmul=1e12, bandwidth=1e9)
    assert (given.matmul["bfloat16"], given.bandwidth) == (1e12, 1e9)
    assert "--matmul" in given.source
    cpu = devices.find("cpu", matmul=5e11, bandwidth=4e10)  # nothing is measured
    assert (cpu.matmul["float32"], cpu.bandwidth) == (5e11, 4e10)
    assert cpu.on_chip_bytes > 0
    with pytest.raises(ValueError, match="device: got 'B100'"):
        devices.find("B100")


def test_this_cpu_is_measured():
    assert devices.measure_products(0.05) > 1e9
    assert devices.measure_bandwidth(0.05) > 1e8


def test_scaling_shows_the_theorems():
    found = {
        (s.variable, algorithm, name): sweeps.exponent(s.values, [value(c) for c in counted])
        for s in sweeps.scaling()
        for algorithm, counted in s.counts.items()
        for name, value in sweeps.VALUES.items()
    }
    assert found["N", "flash1", "extra memory"] == 1
    assert found["N", "standard", "extra memory"] == 2
    assert found["d", "flash1", "accesses"] == pytest.approx(2, abs=0.1)
    assert found["M", "flash1", "accesses"] == pytest.approx(-1, abs=0.1)
    assert found["M", "standard", "accesses"] == 0
    assert found["s", "block_sparse", "FLOPs"] == 1
    assert found["s", "block_sparse", "accesses"] == pytest.approx(1, abs=0.1)
    assert found["s", "flash1", "accesses"] == 0


class TestCommands:
    def test_predict(self, capsys, tmp_path):
        file = tmp_path / "new" / "counts.json"
        problem = ["--B=2", "--H=3", "--S=256", "--D=32", "--dtype=float32", "--M=8192", "--device=H100"]
        cli.main(["predict", *problem, "--mask", "--dropout=0.1", "--json", str(file)])
        printed = capsys.readouterr().out
        for label in (*cli.LABELS.values(), "least ms", "L2"):
            assert (label in printed) == (label != "block-sparse")
        assert "B 2, H 3, S 256, D 32, float32, forward + backward, mask, dropout 0.1; H100, M 8192" in printed
        record = json.loads(file.read_text())
        expected = count("flash1", Problem(2, 3, 256, 32, "float32", mask=True, dropout=0.1), 8192)
        assert record["algorithms"]["flash1"]["bytes"] == expected.bytes
        assert record["algorithms"]["flash1"]["traffic"]["forward q"] == list(expected.traffic["forward", "q"])

    def test_predict_with_a_visible_share(self, capsys, tmp_path):
        file = tmp_path / "counts.json"
        problem = ["--B=2", "--H=3", "--S=256", "--D=32", "--M=8192", "--visible=0.25"]
        cli.main(["predict", *problem, "--json", str(file)])
        printed = capsys.readouterr().out
        assert "float16, forward + backward, visible 0.25; A100-40GB, M 8192" in printed
        assert "block-sparse" in printed
        assert "all other rows compute all blocks" in printed
        record = json.loads(file.read_text())
        expected = count("block_sparse", Problem(2, 3, 256, 32, visible=0.25), 8192)
        assert record["problem"]["visible"] == 0.25
        assert record["algorithms"]["block_sparse"]["bytes"] == expected.bytes
        cli.main(["blocks", *problem, "--plot", str(tmp_path / "figure.png")])
        assert "block-sparse" in capsys.readouterr().out

    @pytest.mark.parametrize("command", [["blocks", "--S", "256", "--D", "16"], ["scaling"]])
    def test_figures(self, command, capsys, tmp_path):
        cli.main([*command, "--plot", str(tmp_path / "figure.png")])
        assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
        assert "FlashAttention-1" in capsys.readouterr().out

    def test_devices(self, capsys):
        cli.main(["devices"])
        printed = capsys.readouterr().out
        assert all(name in printed for name in devices.GPUS)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["predict", "--B", "0"], "got 0; allowed: at least 1"),
            (["predict", "--dropout", "2"], "--dropout: got 2.0; allowed: 0 to 1"),
            (["predict", "--visible", "-0.1"], "--visible: got -0.1; allowed: 0 to 1"),
            (["predict", "--M", "10", "--S", "64"], "M: got 10 elements"),
            (["predict", "--device", "abacus"], "invalid choice: 'abacus'"),
        ],
    )
    def test_errors_name_the_argument(self, arguments, message, capsys):
        with pytest.raises(SystemExit) as stopped:
            cli.main(arguments)
        assert stopped.value.code != 0
        assert message in str(stopped.value) + capsys.readouterr().err

    def test_a_missing_library_is_named_with_the_extra_that_brings_it(self, monkeypatch, tmp_path):
        monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
        with pytest.raises(SystemExit, match=r"figures need matplotlib: pip install 'flash_attn_ext\[model\]'"):
            cli.main(["scaling", "--plot", str(tmp_path / "x.png")])


def test_large_problems_are_counted_in_seconds():
    """16k tokens with our kernel's tiles: 87 thousand tiles forward, 65 thousand backward, and no numbers."""
    result = count("ours", Problem(1, 1, 16384, 64), 8192)
    assert result.matmul_flops == 14 * 16384**2 * 64
    assert torch.finfo(torch.float32).max > result.bytes > 0
