"""The model of the sm90 kernels' time: reading machine code, simulating a multiprocessor, and predicting."""

import subprocess
from types import SimpleNamespace

import pytest
from cubins import CUDA, NVCC, compiled_once, nvcc_flags

from benchmarks.gpu import anchors, sass_listing, time_model
from benchmarks.gpu.multiprocessor import Meet, Product, Wait, Work, simulate
from benchmarks.gpu.problem import Problem
from benchmarks.gpu.time_model import TILINGS, HeadDims, Iteration, Tiling

UPPER = 0x000FC80000000000  # a stall of 4 cycles


def code(*lines):
    """Instructions, 16 bytes apart."""
    text = "Function : kernel\n"
    for n, line in enumerate(lines):
        text += f"        /*{16 * n:04x}*/    {line} ;    /* 0x{n:016x} */\n    /* 0x{UPPER:016x} */\n"
    return sass_listing.functions(text)["kernel"]


def test_instructions_are_read():
    first, second = code("@!P1 MUFU.EX2 R4, R5", "@P0 BRA 0x10")
    assert (first.address, first.predicate, first.name, first.operands) == (0, "@!P1", "MUFU.EX2", "R4, R5")
    assert first.stall == 4
    assert (second.target, second.always_branches) == (16, False)


def test_the_main_loop_is_the_shortest_way_through_the_loop_with_products():
    lines = code(
        "@P0 BRA 0x0",  # a loop without products
        "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR8], R3",
        "@!P0 BRA 0x90",  # waits out of line
        "@P1 BRA 0x70",  # a whole tile: no mask
        "FSEL R1, R2, R3, P4",
        "FSEL R1, R2, R3, P4",
        "FADD R1, R2, R3",
        "@P2 BRA 0x10",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR8], R3",
        "@!P0 BRA 0x90",
        "BRA 0x40",
        "EXIT",
    )
    assert [i.address for i in sass_listing.main_loop(lines)] == [0x10, 0x20, 0x30, 0x40, 0x70, 0x80]


def test_a_product_takes_its_multiplications_or_its_operands_time():
    (registers, shared, narrow) = (time_model.product(i) for i in code(
        "HGMMA.64x256x16.F32.BF16 R24, R192, gdesc[UR16].tnspB, R24, gsb0",
        "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], RZ, !UPT",
        "HGMMA.64x32x16.F32.BF16 R24, gdesc[UR16], R24",
    ))  # fmt: skip
    (float8,) = map(time_model.product, code("QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR16], R24, gsb0"))
    latency = time_model.PRODUCT_LATENCY
    assert registers == Product(64 * 256 * 16 / 2048, 2 * 16 * 256, True, latency)
    assert shared == Product(64, 2 * 16 * (128 + 64), False, latency)
    assert float8 == Product(64, 32 * (128 + 64), True, latency)
    assert narrow.cycles == 2 * 16 * (32 + 64) / 128, "reading takes longer than multiplying"


def test_a_program_is_work_between_events():
    program = time_model.program(code(
        "FMUL R1, R2, R3", "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0", "MUFU.EX2 R4, R5", "FMNMX R1, R2, R3",
        "WARPGROUP.DEPBAR.LE gsb0, 0x1", "BAR.SYNC.DEFER_BLOCKING 0x1, 0x100", "F2FP.BF16.F32.PACK_AB R1, R2, R3",
    ))  # fmt: skip
    assert [type(step) for step in program] == [Work, Product, Work, Wait, Work, Meet, Work]
    assert program[3] == Wait(1)
    assert program[2].units == {"issue": 3, "exponentials": 128 / 16, "ALU": 128 / 64}
    assert (program[2].stalls, program[2].latency) == (12, time_model.LATENCIES["exponentials"])
    assert program[0].latency == 0


BATCH = [Product(100, 0, True), Wait(0)]


def test_products_of_several_warpgroups_queue():
    assert simulate(BATCH, consumers=1, iterations=3) == 300
    assert simulate(BATCH, consumers=2, iterations=3) == 600


def test_one_warpgroup_computes_while_the_other_multiplies():
    alone = [*BATCH, Work({"issue": 100.0}, 0)]
    assert simulate(alone, consumers=1, iterations=10) == 2000
    assert simulate(alone, consumers=2, iterations=10) == pytest.approx(2100)


def test_units_are_shared():
    """Two warpgroups need half of the issue slots each, but both need the exponentials all the time."""
    assert simulate([Work({"issue": 50.0}, 100)], consumers=2, iterations=1) == 100
    assert simulate([Work({"issue": 50.0, "exponentials": 100.0}, 0)], consumers=2, iterations=1) == 200


def test_a_wait_may_leave_a_batch_pending():
    steps = [Product(10, 0, True), Product(100, 0, True), Wait(1), Work({"issue": 80.0}, 0), Wait(0)]
    assert simulate(steps, consumers=1, iterations=1) == 110


def test_meeting_takes_as_long_as_the_last_one():
    assert simulate([Work({"exponentials": 30.0}, 0), Meet(), Work({"issue": 1.0}, 0)], 2, 1) == pytest.approx(62)


def test_a_result_comes_a_latency_after_its_unit_is_free():
    """The tensor cores begin the next product before that. Two warpgroups hide each other's latencies."""
    batch = [Product(100, 0, True, 20), Wait(0)]
    assert simulate(batch, consumers=1, iterations=10) == 1200
    assert simulate(batch, consumers=2, iterations=10) == pytest.approx(2020)
    assert simulate([Work({"issue": 50.0}, 10, 30)], consumers=1, iterations=3) == 240
    assert simulate([Work({"issue": 50.0}, 0), Meet(30)], consumers=2, iterations=3) == pytest.approx(3 * (100 + 30))


@pytest.mark.parametrize("owns_keys", [False, True])
def test_causal_blocks_make_half_of_the_turns(owns_keys):
    tiling = Tiling(2, 128, 64, owns_keys)
    full, causal = (sum(time_model.tiles_of_tasks(Problem(1, 1, 4096, 64, causal), tiling)) for causal in (False, True))
    assert full == 32 * 64
    assert full / 2 < causal < full / 2 * 1.1


def test_more_blocks_than_multiprocessors_take_another_wave():
    iteration = Iteration(1000.0, {"tensor": 900.0})
    dims = HeadDims(128, 128)
    tiling = TILINGS["forward", dims]
    one, two = (
        time_model.seconds(Problem(1, heads, 128, 128, False), "forward", iteration, tiling, dims)
        for heads in (132, 133)
    )
    assert two == pytest.approx(2 * one)
    assert iteration.bound == "tensor 90%"


def test_the_model_compiles_as_the_build_does(monkeypatch, tmp_path):
    commands = []
    monkeypatch.setattr(time_model, "ROOT", tmp_path)
    monkeypatch.setattr(time_model.units, "nvcc", lambda: "nvcc")
    monkeypatch.setattr(
        subprocess, "Popen", lambda command: commands.append(command) or SimpleNamespace(wait=lambda: 0)
    )
    time_model.compile_machine_code()
    for name, command in zip(("forward_bfloat16", "backward_bfloat16", "forward_float8"), commands, strict=True):
        assert tmp_path / "csrc" / (CUDA / "sm90" / f"{name}.cu").relative_to(CUDA.parent) in command
        assert {"-arch=sm_90a", "-std=c++20", *nvcc_flags()} - set(command) == {"-DFLASH_ATTN_EXT_WITH_CUDA"}


@pytest.fixture(scope="module")
def iterations():
    """Of the machine code that test_cuda_compile.py reads too."""
    if not NVCC.exists() or sass_listing.tool("cuobjdump") is None or sass_listing.tool("nvdisasm") is None:
        pytest.skip("needs nvcc, and cuobjdump and nvdisasm of the CUDA toolkit or of PyPI")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            time_model, "machine_code", lambda source: compiled_once(CUDA / "sm90" / f"{source}.cu", "90a")[0]
        )
        return time_model.iterations()


@pytest.mark.parametrize(("way", "dims"), TILINGS, ids=str)
def test_the_kernels_turns(iterations, way, dims):
    """The model finds the products of one tile: two in the forward, five in the backward."""
    tiling, iteration = TILINGS[way, dims], iterations[way, dims]
    loop = sass_listing.main_loop(time_model.kernels()[way, dims])
    products = [step for step in time_model.program(loop) if isinstance(step, Product)]
    flops = 2 * (5 if way == "backward" else 2) * tiling.rows * tiling.keys * dims.mean(way == "backward")
    ideal = flops / 2 / time_model.TENSOR_FMA * tiling.bytes / 2
    # Shared memory bounds the narrow products of the backward beyond a head dimension of 128.
    assert ideal <= iteration.units["tensor"] <= (1.31 if tiling.owns_keys else 1.25) * ideal
    assert sum(product.ends_batch for product in products) in (2, 5)
    assert iteration.cycles >= max(iteration.units.values())
    exponentials = iteration.units["exponentials"] * time_model.LANES["exponentials"]
    assert tiling.rows * tiling.keys <= exponentials <= 1.1 * tiling.rows * tiling.keys


def test_a_prediction_is_below_the_peak(iterations):
    peak = 2 * time_model.TENSOR_FMA * time_model.MULTIPROCESSORS * time_model.CLOCK / 1e12
    for way in time_model.SOURCES:
        rates = [
            time_model.prediction(Problem(16384 // length, 16, length, 128, False), way)["TFLOP/s"]
            for length in (512, 2048, 16384)
        ]
        assert rates == sorted(rates)
        assert rates[-1] < peak * (2 if way == "float8" else 1)
        assert time_model.prediction(Problem(1, 1, 64, 80, False), way) is None


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_v_is_transposed_faster_than_the_tensor_cores_multiply(iterations, head_dim):
    """Three warps, with the latency of each load: else float8 would be bound by the transposition."""
    units = iterations["float8", HeadDims(head_dim, head_dim)].units
    assert 0.3 * units["tensor"] < units["transposition"] < units["tensor"]


def test_blocks_that_share_their_loads_need_less_of_l2(iterations):
    """A pair loads each tile once. In the backward each block still adds its own dQ."""
    for (way, dims), iteration in time_model.iterations(True).items():
        alone, added = iterations[way, dims], TILINGS[way, dims].added_bytes(dims) / time_model.L2_BYTES
        assert iteration.units["L2"] == pytest.approx((alone.units["L2"] - added) / 2 + added)
        assert iteration.units["shared memory"] == alone.units["shared memory"]
        assert iteration.cycles <= alone.cycles
    assert time_model.IN_PAIRS in iterations
    assert "L2" not in time_model.iterations(True)[time_model.IN_PAIRS].bound


def test_blocks_of_a_pair_visit_the_same_tiles():
    tiling = Tiling(2, 64, 64, True).in_pairs()
    assert time_model.tiles_of_tasks(Problem(1, 1, 256, 256, True), tiling) == [4, 4, 2, 2]
    assert sorted(time_model.deal_as_they_end([4.0, 4.0, 2.0, 2.0], sharers=2))[-3:] == [0.0, 2.0, 4.0]


def test_pairs_are_predicted_to_be_faster(iterations):
    for causal in (False, True):
        problem = Problem(4, 8, 4096, 256, causal)
        alone, in_pairs = (
            time_model.prediction(problem, "backward", in_pairs=pairs)["TFLOP/s"] for pairs in (False, True)
        )
        assert alone < in_pairs


def test_the_table_of_published_figures(iterations, capsys):
    """Each cell has a prediction; a cell below 0.9 names the unit that bounds it."""
    assert time_model.main(["--anchors"]) == 0
    lines = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if " D " in line]
    assert len(lines) == len(list(anchors.cells())) == 53
    for *_, model, published, ratio, bound in lines:
        assert float(ratio) == pytest.approx(float(model) / float(published), abs=0.01)
        assert (float(ratio) >= anchors.ENOUGH) == (bound.strip() == "")


def test_a_narrower_value_takes_less_time(iterations):
    """Head dimensions 192 and 128 cost as much as 160: as many TFLOP/s as 192, in less time."""
    problem = Problem(1, 16, 8192, 192, False)
    own, as_long = (time_model.prediction(problem, "forward", head_dim_v)["TFLOP/s"] for head_dim_v in (128, 192))
    assert own == pytest.approx(as_long, rel=0.1)
