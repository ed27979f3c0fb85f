"""The CUDA kernels' host build as a library, and as the operators' CPU kernels for as long as a test runs."""

import ctypes
import fcntl
import functools
import math
import os
import re
import shutil
import subprocess
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch

from flash_attn_ext import _C

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "cuda_host"
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3, torch.bool: 4}
UNBOUNDED = 1 << 60
GPU_CODE = "sm_80,compute_80,sm_90a"  # setup.py builds these
INDEXER = ("scores", "scores_backward", "loss", "loss_backward")  # the indexer's operators
# The C functions that return text, or null.
TEXTS = (
    "forward", "backward", "dropout_mask", "last_kernel", "forward_choice", "backward_choice", "force_tier",
    "jvp", "double_backward", "jvp_choice", "double_backward_choice", "why_not_sm80_forward",
    "why_not_sm80_backward", "why_not_sm90_forward", "why_not_sm90_backward", "weights", "weights_choice", "replay",
    "indexed", "indexed_choice", "indexed_backward", "indexed_backward_choice", "sm90_task_order",
    *(f"indexer_{name}{text}" for name in INDEXER for text in ("", "_choice")),
)  # fmt: skip

WITH_WORKSPACE = ("forward", "backward", "double_backward", "weights", "indexed", "indexed_backward")
WITH_WORKSPACE += tuple(f"indexer_{name}" for name in INDEXER)

i64, u64, f64, pointer = ctypes.c_int64, ctypes.c_uint64, ctypes.c_double, ctypes.c_void_p


SCALARS = {"int64_t": i64, "uint64_t": u64, "double": f64, "bool": ctypes.c_bool}
SCALARS |= dict.fromkeys(("DType", "CacheDType"), ctypes.c_int8)


def structs_of(header, included=()):
    """The plain structs of a C++ header as ctypes structs, by name: their fields as they are declared there.
    ``included``: the structs of headers that it includes."""
    structs = dict(included)
    text = re.sub(r"//[^\n]*", "", header.read_text())
    for name, base, body in re.findall(r"^struct (\w+)(?: : (\w+))? \{(.*?)^\};", text, re.DOTALL | re.MULTILINE):
        fields = []
        body = re.sub(r"\)(?: const)? \{[^{}]*\}", ");", body)  # functions without their bodies
        for statement in filter(None, (s.strip() for s in body.split(";"))):
            if "(" in statement or statement.startswith("static"):
                continue
            kind, is_pointer, names = re.fullmatch(r"(?:const )?(\w+)(\*?) (.*)", statement, re.DOTALL).groups()
            kind = pointer if is_pointer else SCALARS.get(kind) or structs[kind]
            fields += [(re.match(r"\w+", n.strip()).group(), kind) for n in names.split(",")]
        structs[name] = type(name, (structs[base] if base else ctypes.Structure,), {"_fields_": fields})
    return structs


PARAMS = structs_of(ROOT / "csrc" / "core" / "params.h")
PARAMS = structs_of(ROOT / "csrc" / "core" / "indexed.h", PARAMS)
PARAMS = structs_of(ROOT / "csrc" / "core" / "indexer.h", PARAMS)
Sizes, Tensor4, Band, Offsets, MaskGrad = (PARAMS[name] for name in ("Sizes", "Tensor4", "Band", "Offsets", "MaskGrad"))
MaskParams, AlibiParams, SinkParams, DropoutParams, DecodeParams, VarlenParams = (
    PARAMS[f"{name}Params"] for name in ("Mask", "Alibi", "Sink", "Dropout", "Decode", "Varlen")
)
NAMES_OF_CALLS = ("Attention", "Backward", "Jvp", "DoubleBackward", "Weights", "Indexed", "IndexedBackward")
NAMES_OF_CALLS += ("IndexerScores", "IndexerScoresBackward", "IndexerLoss", "IndexerLossBackward")
CALLS = [PARAMS[f"{name}Params"] for name in NAMES_OF_CALLS]
AttentionParams, BackwardParams, JvpParams, DoubleBackwardParams, WeightsParams, *_ = CALLS
IndexedParams, IndexedBackwardParams, *INDEXER_PARAMS = CALLS[5:]


# The kernels of each operator: a C function of interface.cpp, and the struct that it takes.
DENSE_AND_PACKED = {
    "": ("forward", AttentionParams), "_backward": ("backward", BackwardParams), "_jvp": ("jvp", JvpParams),
    "_double_backward": ("double_backward", DoubleBackwardParams),
}  # fmt: skip
OPERATORS = {
    f"{name}{step}": run for name in ("attention", "attention_varlen") for step, run in DENSE_AND_PACKED.items()
}
OPERATORS |= {
    "attention_cache": ("forward", AttentionParams),
    "attention_weights": ("weights", WeightsParams),
    "attention_weights_backward": ("backward", BackwardParams),
    "attention_indexed": ("indexed", IndexedParams),
    "attention_indexed_backward": ("indexed_backward", IndexedBackwardParams),
    "attention_flex": ("forward", AttentionParams), "attention_flex_backward": ("backward", BackwardParams),
    "attention_varlen_flex": ("forward", AttentionParams),
    "attention_varlen_flex_backward": ("backward", BackwardParams),
    "attention_cache_flex": ("forward", AttentionParams),
    **{f"indexer_{name}": (f"indexer_{name}", params) for name, params in zip(INDEXER, INDEXER_PARAMS, strict=True)},
}  # fmt: skip


class KernelError(Exception):
    """An error of the host run: a race, an access out of bounds, a deadlock, a launch that failed."""


def build(sources=ROOT / "csrc", folder=BUILD):
    """The library's path, after rebuilding changed files."""
    if shutil.which("make") is None:
        raise RuntimeError("needs make and g++ (or CXX); there is no make")
    command = ["make", f"-j{len(os.sched_getaffinity(0))}", "-C", HERE, f"SOURCES={sources}", f"BUILD={folder}"]
    Path(folder).mkdir(parents=True, exist_ok=True)
    with (Path(folder) / "lock").open("w") as lock:  # the workers of pytest-xdist share the folder
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stdout[-5000:])
    return Path(folder) / "libcuda_host.so"


class Library:
    def __init__(self, path, seed=1, deterministic=None):
        self.path = path
        self.num_splits = 0  # used by calls without num_splits
        self.deterministic = deterministic  # None: as the option says; a bool replaces the option
        self.flagged_tiles = -1  # tiles with a NaN in the last backward; -1: sm80 did not run
        self.tier, self.why_not = None, []  # choice() of the last call
        self.c = ctypes.CDLL(str(path))
        for name in TEXTS:
            getattr(self.c, name).restype = ctypes.c_char_p
        workspaces = [f"{name}_workspace" for name in WITH_WORKSPACE]
        for name in ("params_bytes", *workspaces):
            getattr(self.c, name).restype = ctypes.c_size_t
        counts = "sm80_flagged_tiles", "sm90_dealt_tasks", "sm90_sorted_tasks", "exponentials", "attributes_set"
        for name in (*counts, "driver_lookups"):
            getattr(self.c, name).restype = i64
        self.c.exp2_fast.argtypes, self.c.exp2_fast.restype = [ctypes.c_float], ctypes.c_float
        self.c.register_buffer.argtypes = [pointer, i64, i64, ctypes.c_char_p, ctypes.c_bool, ctypes.c_bool]
        self.c.seed_order.argtypes = [u64]
        for n, kind in enumerate(CALLS):
            assert self.c.params_bytes(n) == ctypes.sizeof(kind), kind.__name__
        self.seed_order(seed)

    @contextmanager
    def on_gpu(self, major, minor, code=GPU_CODE):
        """Inside, the selector sees a GPU of this compute capability, and a build with this code. The GPU has two
        multiprocessors, unless a test sets another number."""
        self.c.set_compute_capability(major, minor)
        self.c.set_gpu_code(code.encode())
        try:
            yield
        finally:
            self.c.set_compute_capability(8, 0)
            self.c.set_multiprocessors(2)
            self.c.set_gpu_code(GPU_CODE.encode())

    def force_tier(self, tier):
        error = self.c.force_tier(tier.encode())
        if error is not None:
            raise ValueError(error.decode())

    def choice(self, params):
        """The tier that the selector takes, or the reason why no tier can run the call.

        And the reason against each faster tier.
        """
        select = {
            AttentionParams: self.c.forward_choice,
            BackwardParams: self.c.backward_choice,
            JvpParams: self.c.jvp_choice,
            DoubleBackwardParams: self.c.double_backward_choice,
            WeightsParams: self.c.weights_choice,
            IndexedParams: self.c.indexed_choice,
            IndexedBackwardParams: self.c.indexed_backward_choice,
            **{p: getattr(self.c, f"indexer_{n}_choice") for n, p in zip(INDEXER, INDEXER_PARAMS, strict=True)},
        }[type(params)]
        tier, *why_not = select(ctypes.byref(params)).decode().splitlines()
        return tier, why_not

    def seed_order(self, seed):
        """Changes the order of fibers and blocks. Equal seeds give equal orders."""
        self.c.seed_order(seed)

    def show(self, tensors, outputs=()):
        """Tells the library which memory exists. Every other address is out of bounds."""
        self.c.forget_buffers()
        for name, t in tensors.items():
            if t is not None and t.numel():
                storage = t.untyped_storage()
                written = name in outputs
                self.c.register_buffer(
                    storage.data_ptr(), storage.nbytes(), t.element_size(), name.encode(), written, not written
                )

    def check(self, error):
        if error is not None:
            raise KernelError(re.sub(r"code (0x[0-9a-f]+)", self._source_line, error.decode()))

    def _source_line(self, match):
        command = ["addr2line", "-e", str(self.path), match.group(1)]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip().rsplit("/", 1)[-1]

    def operator(self, name, *tensors, **options):
        """Runs an operator. The extension checks, allocates and packs, as for CUDA; the host build runs the kernels."""
        arguments = getattr(torch.ops.flash_attn_ext, name).default._schema.arguments
        given = {a.name: a.default_value for a in arguments}
        given |= dict(zip(given, tensors, strict=False)) | options
        tensors, options = (
            {a.name: given[a.name] for a in arguments if a.kwarg_only == keyword} for keyword in (False, True)
        )
        kind, params_type = OPERATORS[name]

        def run(data, inputs, outputs):
            params = params_type.from_buffer_copy(data)
            if isinstance(params, AttentionParams):
                params.decode.num_splits = params.decode.num_splits or self.num_splits
            if self.deterministic is not None and isinstance(params, BackwardParams):
                params.deterministic = self.deterministic
            self.launch(kind, params, inputs, outputs)

        results = tuple(getattr(_C, f"run_{name}")(tensors, options, run))
        return results if len(results) > 1 else results[0]

    def launch(self, kind, params, inputs, outputs):
        """Runs the kernels on packed params. They may read `inputs` and write `outputs`, both by name."""
        self.tier, self.why_not = self.choice(params)
        size = getattr(self.c, f"{kind}_workspace")(ctypes.byref(params)) if kind in WITH_WORKSPACE else 0
        workspace = empty_workspace(size)
        self.kept = inputs, outputs, workspace  # replay() uses this memory again, as a graph's private pool
        self.show({**inputs, **outputs, "workspace": workspace}, (*outputs, "workspace"))
        arguments = ctypes.byref(params), pointer(workspace.data_ptr())
        if kind == "backward":
            self.c.require_ordered_adds(params.deterministic)
        self.rehearse(lambda: getattr(self.c, kind)(*arguments), inputs)
        if kind == "backward":
            self.flagged_tiles = self.c.sm80_flagged_tiles(*arguments)

    def dropout_mask(self, rng_state, batch, heads, seqlen_q, seqlen_k, dropout_p, first_row=0):
        kept = torch.empty(batch, heads, seqlen_q, seqlen_k, dtype=torch.bool)
        self.show({"rng_state": rng_state, "kept": kept}, ("kept",))
        sizes = Sizes(batch, heads, heads, seqlen_q, seqlen_k, 1, 1)
        dropout = dropout_params(rng_state, dropout_p)
        arguments = ctypes.byref(dropout), ctypes.byref(sizes), i64(first_row), pointer(kept.data_ptr())
        self.rehearse(lambda: self.c.dropout_mask(*arguments), {"rng_state": rng_state})
        return kept

    def rehearse(self, launch, inputs):
        """Records the kernels that `launch` enqueues, then runs them, as a CUDA graph does.

        During the recording the inputs hold other values, so a launcher that reads inputs on the host gives wrong
        results.
        """
        with replaced(inputs.values()):
            self.c.begin_capture()
            try:
                error = launch()
            finally:
                self.c.end_capture()
        self.check(error)
        self.replay()

    def replay(self):
        """Runs the last call again, on the present values of its inputs."""
        self.check(self.c.replay())


def offsets(t):
    return Offsets() if t is None else Offsets(t.data_ptr(), t.dtype == torch.int64)


def empty_workspace(size):
    assert size % 4 == 0
    return torch.empty(size // 4, dtype=torch.float32)


@contextmanager
def replaced(tensors):
    """Inside, all bytes of these tensors are 255: NaN, -1 or True."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t is not None}
    saved = [(storage, storage.clone()) for storage in storages.values()]
    for storage, _ in saved:
        storage.fill_(255)
    try:
        yield
    finally:
        for storage, values in saved:
            storage.copy_(values)


def dropout_params(rng_state, p):
    place = rng_state[2:].data_ptr() if rng_state.numel() > 2 else None
    return DropoutParams(rng_state.data_ptr(), place, round(math.ldexp(p, 32)), 1 / (1 - p) if p < 1 else 0.0)


@contextmanager
def as_cpu_kernels(library):
    """Inside, the attention operators on CPU tensors run the CUDA kernels' host build."""
    operators = {name: functools.partial(library.operator, name) for name in OPERATORS}
    with registered(dropout_mask=library.dropout_mask, **operators):
        yield library


@contextmanager
def registered(**operators):
    """Inside, these functions are the kernels of the operators of their names on CPU tensors."""
    registration = torch.library.Library("flash_attn_ext", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*[Oo]verrid")
        for name, function in operators.items():
            registration.impl(name, function, "CPU")
    try:
        yield
    finally:
        registration._destroy()


@contextmanager
def on_hopper(path, num_splits=0, **options):
    """Like as_cpu_kernels(), for a library. The selector of the library sees a Hopper GPU."""
    loaded = Library(path, **options)
    loaded.num_splits = num_splits
    with loaded.on_gpu(9, 0), as_cpu_kernels(loaded):
        yield loaded
