"""The CUDA kernels' host build as a library, and as the operators' CPU kernels for as long as a test runs."""

import ctypes
import fcntl
import math
import os
import re
import shutil
import subprocess
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "cuda_host"
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3, torch.bool: 4}
UNBOUNDED = 1 << 60
GPU_CODE = "sm_80,compute_80,sm_90a"  # what setup.py builds
# The C functions that return text, or null.
TEXTS = (
    "forward", "backward", "dropout_mask", "last_kernel", "forward_choice", "backward_choice", "force_tier",
    "jvp", "double_backward", "jvp_choice", "double_backward_choice", "why_not_sm80_forward",
    "why_not_sm80_backward", "why_not_sm90_forward", "why_not_sm90_backward", "weights", "weights_choice",
)  # fmt: skip

i64, u64, f64, pointer = ctypes.c_int64, ctypes.c_uint64, ctypes.c_double, ctypes.c_void_p


SCALARS = {"int64_t": i64, "uint64_t": u64, "double": f64, "bool": ctypes.c_bool}
SCALARS |= dict.fromkeys(("DType", "CacheDType"), ctypes.c_int8)


def structs_of(header):
    """The plain structs of a C++ header as ctypes structs, by name: their fields as they are declared there."""
    structs = {}
    text = re.sub(r"//[^\n]*", "", header.read_text())
    for name, base, body in re.findall(r"^struct (\w+)(?: : (\w+))? \{(.*?)^\};", text, re.DOTALL | re.MULTILINE):
        fields = []
        body = re.sub(r"\)(?: const)? \{[^{}]*\}", ");", body)  # functions without what they do
        for statement in filter(None, (s.strip() for s in body.split(";"))):
            if "(" in statement or statement.startswith("static"):
                continue
            kind, is_pointer, names = re.fullmatch(r"(?:const )?(\w+)(\*?) (.*)", statement, re.DOTALL).groups()
            kind = pointer if is_pointer else SCALARS.get(kind) or structs[kind]
            fields += [(re.match(r"\w+", n.strip()).group(), kind) for n in names.split(",")]
        structs[name] = type(name, (structs[base] if base else ctypes.Structure,), {"_fields_": fields})
    return structs


PARAMS = structs_of(ROOT / "csrc" / "core" / "params.h")
Sizes, Tensor4, Band, Offsets, MaskGrad = (PARAMS[name] for name in ("Sizes", "Tensor4", "Band", "Offsets", "MaskGrad"))
MaskParams, AlibiParams, SinkParams, DropoutParams, DecodeParams, VarlenParams = (
    PARAMS[f"{name}Params"] for name in ("Mask", "Alibi", "Sink", "Dropout", "Decode", "Varlen")
)
AttentionParams, BackwardParams, JvpParams, DoubleBackwardParams, WeightsParams = CALLS = [
    PARAMS[f"{name}Params"] for name in ("Attention", "Backward", "Jvp", "DoubleBackward", "Weights")
]


class KernelError(Exception):
    """What the host run found: a race, an access out of bounds, a deadlock, a launch that failed."""


def build(sources=ROOT / "csrc", folder=BUILD):
    """The library's path, after rebuilding what changed."""
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
        self.num_splits = 0
        self.deterministic = deterministic  # None: as the option says; a bool decides over it
        self.flagged_tiles = -1  # with a NaN, by the last backward; -1: it was not that of sm80
        self.c = ctypes.CDLL(str(path))
        for name in TEXTS:
            getattr(self.c, name).restype = ctypes.c_char_p
        workspaces = [f"{name}_workspace" for name in ("forward", "backward", "double_backward", "weights")]
        for name in ("params_bytes", *workspaces):
            getattr(self.c, name).restype = ctypes.c_size_t
        for name in ("sm80_flagged_tiles", "sm90_dealt_tasks", "exponentials", "attributes_set", "driver_lookups"):
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
        """The tier that the selector takes, or, if none can run, the reason; and why each faster one does not."""
        select = {
            AttentionParams: self.c.forward_choice,
            BackwardParams: self.c.backward_choice,
            JvpParams: self.c.jvp_choice,
            DoubleBackwardParams: self.c.double_backward_choice,
            WeightsParams: self.c.weights_choice,
        }[type(params)]
        tier, *why_not = select(ctypes.byref(params)).decode().splitlines()
        return tier, why_not

    def seed_order(self, seed):
        """Another order of fibers and blocks, the same for the same seed."""
        self.c.seed_order(seed)

    def show(self, tensors, outputs=()):
        """Tells the library what memory there is: everything else is out of bounds."""
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

    def pack(self, params, tensors, options):
        """As csrc/ops/pack_params.cpp does."""
        q, k, v, mask = (tensors[name] for name in ("q", "k", "v", "attn_mask"))
        params.dtype = DTYPES[q.dtype]
        params.sizes = Sizes(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
        for name in ("q", "k", "v", "out"):
            setattr(params, name, tensor4(tensors[name]))
        params.lse = tensors["lse"].data_ptr()
        params.scale = 1 / math.sqrt(q.shape[3]) if options["scale"] is None else options["scale"]
        params.softcap = options["softcap"]
        left, right = options["window_left"], options["window_right"]
        params.band = Band(
            options["diagonal"] + (k.shape[2] - q.shape[2] if options["lower_right"] else 0),
            UNBOUNDED if left is None else left,
            min(UNBOUNDED if right is None else right, 0 if options["causal"] else UNBOUNDED),
        )
        self.pack_added(params, mask, tensors.get("slopes"), tensors.get("sink"))
        key_mask = tensors.get("key_mask")
        if key_mask is not None:
            params.mask.key_data, params.mask.key_dtype = key_mask.data_ptr(), DTYPES[key_mask.dtype]
            params.mask.key_stride_b, params.mask.key_stride_k = key_mask.stride()
        if options["dropout_p"] > 0:
            params.dropout = dropout_params(tensors["rng_state"], options["dropout_p"])
        unified_max = options["unified_max"]
        num_splits = options["num_splits"] or self.num_splits
        params.decode = DecodeParams(num_splits, unified_max is not None, unified_max or 0.0)
        return params

    def pack_added(self, params, mask, slopes, sink):
        """What is added to scores, or its tangents."""
        if mask is not None:
            strides = [0 if n == 1 else s for n, s in zip(mask.shape, mask.stride(), strict=True)]
            params.mask = MaskParams(mask.data_ptr(), DTYPES[mask.dtype], *strides)
        for t, field, kind in ((slopes, "alibi", AlibiParams), (sink, "sink", SinkParams)):
            if t is not None:
                setattr(params, field, kind(t.data_ptr(), t.stride(0) if t.dim() == 2 else 0, t.stride(-1)))

    def pack_tangents(self, params, tensors):
        for name in ("q", "k", "v"):
            if tensors["t_" + name] is not None:
                setattr(params.tangents, name, tensor4(tensors["t_" + name]))
        self.pack_added(params.tangents, tensors["t_attn_mask"], tensors["t_slopes"], tensors["t_sink"])

    def forward(self, tensors, **options):
        q, v = tensors["q"], tensors["v"]
        tensors["out"] = empty_in_order_of(q, v.shape[3])
        tensors["lse"] = torch.empty(q.shape[:3], dtype=accumulate_type(q))
        params = self.pack(AttentionParams(), tensors, options)
        workspace = empty_workspace(self.c.forward_workspace(ctypes.byref(params)))
        self.show({**tensors, "workspace": workspace}, ("out", "lse", "workspace"))
        self.check(self.c.forward(ctypes.byref(params), pointer(workspace.data_ptr())))
        return tensors["out"], tensors["lse"]

    def jvp(self, tensors, **options):
        q, v = tensors["q"], tensors["v"]
        results = ("out", "lse", "t_out", "t_lse")
        for prefix in ("", "t_"):
            tensors[prefix + "out"] = empty_in_order_of(q, v.shape[3])
            tensors[prefix + "lse"] = torch.empty(q.shape[:3], dtype=accumulate_type(q))
        params = self.pack(JvpParams(), tensors, options)
        self.pack_tangents(params, tensors)
        params.t_out, params.t_lse = tensor4(tensors["t_out"]), tensors["t_lse"].data_ptr()
        self.show(tensors, results)
        self.check(self.c.jvp(ctypes.byref(params), None))
        return tuple(tensors[name] for name in results)

    def backward(self, tensors, wanted, **options):
        """The gradients that are wanted, by name."""
        params = BackwardParams()
        grads = self.pack_backward(params, tensors, wanted, options)
        workspace = empty_workspace(self.c.backward_workspace(ctypes.byref(params)))
        self.show({**tensors, **grads, "workspace": workspace}, (*grads, "workspace"))
        self.c.require_ordered_adds(params.deterministic)
        arguments = ctypes.byref(params), pointer(workspace.data_ptr())
        self.check(self.c.backward(*arguments))
        self.flagged_tiles = self.c.sm80_flagged_tiles(*arguments)
        return sum_per_head(grads, tensors)

    def double_backward(self, tensors, wanted, **options):
        """The same, of the second derivative."""
        params = DoubleBackwardParams()
        grads = self.pack_backward(params, tensors, wanted, options)
        self.pack_tangents(params, tensors)
        params.t_out, params.t_lse = tensor4(tensors["t_out"]), tensors["t_lse"].data_ptr()
        workspace = empty_workspace(self.c.double_backward_workspace(ctypes.byref(params)))
        self.show({**tensors, **grads, "workspace": workspace}, (*grads, "workspace"))
        self.check(self.c.double_backward(ctypes.byref(params), pointer(workspace.data_ptr())))
        return sum_per_head(grads, tensors)

    def weights(self, tensors, **options):
        q, k = tensors["q"], tensors["k"]
        weights = torch.empty(q.shape[0], q.shape[2], k.shape[2], dtype=q.dtype)
        params = self.pack(WeightsParams(), tensors, options)
        params.weights = weights_tensor(weights)
        workspace = empty_workspace(self.c.weights_workspace(ctypes.byref(params)))
        self.show({**tensors, "weights": weights, "workspace": workspace}, ("weights", "workspace"))
        self.check(self.c.weights(ctypes.byref(params), pointer(workspace.data_ptr())))
        return weights

    def pack_backward(self, params, tensors, wanted, options):
        """Fills the params; returns the gradients that the kernels will write, those of slopes and sink by batch."""
        self.pack(params, tensors, options)
        params.deterministic = options["deterministic"] if self.deterministic is None else self.deterministic
        params.dout = tensor4(tensors["dout"])
        params.dlse = None if tensors["dlse"] is None else tensors["dlse"].data_ptr()
        if "dweights" in tensors:
            params.dweights = weights_tensor(tensors["dweights"])
        grads = {}
        for name in ("q", "k", "v"):
            if wanted[name]:
                grads["d" + name] = empty_in_order_of(tensors[name], tensors[name].shape[3])
                setattr(params, "d" + name, tensor4(grads["d" + name]))
        if wanted["attn_mask"]:
            grads["dmask"] = torch.empty(tensors["attn_mask"].shape, dtype=tensors["attn_mask"].dtype)
            params.dmask = MaskGrad(grads["dmask"].data_ptr(), *grads["dmask"].shape)
        if wanted["slopes"]:
            grads["dslopes"] = torch.empty(tensors["q"].shape[:2], dtype=tensors["lse"].dtype)
            params.dalibi_slopes = grads["dslopes"].data_ptr()
        if wanted["sink"]:
            grads["dsink"] = torch.empty(tensors["q"].shape[:2], dtype=tensors["lse"].dtype)
            params.dsink = grads["dsink"].data_ptr()
        return grads

    def dropout_mask(self, rng_state, batch, heads, seqlen_q, seqlen_k, dropout_p, first_row=0):
        kept = torch.empty(batch, heads, seqlen_q, seqlen_k, dtype=torch.bool)
        self.show({"rng_state": rng_state, "kept": kept}, ("kept",))
        sizes = Sizes(batch, heads, heads, seqlen_q, seqlen_k, 1, 1)
        dropout = dropout_params(rng_state, dropout_p)
        arguments = ctypes.byref(dropout), ctypes.byref(sizes), i64(first_row), pointer(kept.data_ptr())
        self.check(self.c.dropout_mask(*arguments))
        return kept


def tensor4(t):
    return Tensor4(t.data_ptr(), *t.stride()[:3])


def weights_tensor(t):
    return Tensor4(t.data_ptr(), t.stride(0), 0, t.stride(1))


def sum_per_head(grads, tensors):
    """The gradients of slopes and sink in their own shapes."""
    for name in ("slopes", "sink"):
        if "d" + name in grads and tensors[name].dim() == 1:
            grads["d" + name] = grads["d" + name].sum(0)
    return grads


def offsets(t):
    return Offsets() if t is None else Offsets(t.data_ptr(), t.dtype == torch.int64)


def empty_workspace(size):
    assert size % 4 == 0
    return torch.empty(size // 4, dtype=torch.float32)


def dropout_params(rng_state, p):
    place = rng_state[2:].data_ptr() if rng_state.numel() > 2 else None
    return DropoutParams(rng_state.data_ptr(), place, round(math.ldexp(p, 32)), 1 / (1 - p) if p < 1 else 0.0)


def accumulate_type(t):
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def zeros_like_one_row(t):
    return torch.zeros(1, 1, 1, t.shape[3], dtype=t.dtype).expand_as(t)


def to_kernel_layout(t):
    return t if t.shape[-1] <= 1 or t.stride(-1) == 1 else t.contiguous()


def empty_in_order_of(like, last_dim):
    b, h, s, _ = like.shape
    if like.stride(1) < like.stride(2):
        return torch.empty(b, s, h, last_dim, dtype=like.dtype).transpose(1, 2)
    return torch.empty(b, h, s, last_dim, dtype=like.dtype)


DIFFERENTIABLE = ("q", "k", "v", "attn_mask", "slopes", "sink")
DEFAULTS = {
    "scale": None, "causal": False, "lower_right": False, "diagonal": 0, "window_left": None, "window_right": None,
    "softcap": 0.0, "dropout_p": 0.0, "num_splits": 0, "unified_max": None, "deterministic": False,
}  # fmt: skip


@contextmanager
def as_cpu_kernels(library):
    """Inside, flash_attn and its backward on CPU tensors run through the CUDA kernels' host build."""

    def inputs(q, k, v, mask, slopes, sink, rng_state, key_mask):
        if mask is None and key_mask is not None:
            mask, key_mask = key_mask[:, None, None], None
        slopes, sink = (None if t is None else t.to(accumulate_type(q)) for t in (slopes, sink))
        tensors = {"q": to_kernel_layout(q), "k": to_kernel_layout(k), "v": to_kernel_layout(v)}
        tensors |= {"attn_mask": mask, "slopes": slopes, "sink": sink, "rng_state": rng_state, "key_mask": key_mask}
        return tensors

    def tangents(q, k, v, mask, slopes, sink, acc):
        slopes, sink = (None if t is None else t.to(acc) for t in (slopes, sink))
        q, k, v = (None if t is None else to_kernel_layout(t) for t in (q, k, v))
        return {"t_q": q, "t_k": k, "t_v": v, "t_attn_mask": mask, "t_slopes": slopes, "t_sink": sink}

    def cotangents(dout, dlse, out):
        dout = zeros_like_one_row(out) if dout is None else to_kernel_layout(dout)
        return {"dout": dout, "dlse": None if dlse is None else dlse.contiguous()}

    def as_results(grads, slopes, sink):
        for name, t in (("dslopes", slopes), ("dsink", sink)):
            if name in grads:
                grads[name] = grads[name].to(t.dtype)
        return tuple(grads.get("d" + name.removeprefix("attn_")) for name in DIFFERENTIABLE)

    def attention(q, k, v, attn_mask=None, alibi_slopes=None, sink=None, rng_state=None, key_mask=None, **options):
        tensors = inputs(q, k, v, attn_mask, alibi_slopes, sink, rng_state, key_mask)
        return library.forward(tensors, **DEFAULTS | options)

    def attention_backward(
        dout, dlse, q, k, v, mask, slopes, sink, rng_state, key_mask, out, lse, grad_mask=None, **options
    ):
        tensors = inputs(q, k, v, mask, slopes, sink, rng_state, key_mask) | {"out": to_kernel_layout(out), "lse": lse}
        tensors |= cotangents(dout, dlse, out)
        wanted = dict(zip(DIFFERENTIABLE, grad_mask, strict=True))
        return as_results(library.backward(tensors, wanted, **DEFAULTS | options), slopes, sink)

    def attention_jvp(tq, tk, tv, tmask, tslopes, tsink, q, k, v, mask=None, slopes=None, sink=None, rng_state=None,
                      key_mask=None, **options):  # fmt: skip
        tensors = inputs(q, k, v, mask, slopes, sink, rng_state, key_mask)
        tensors |= tangents(tq, tk, tv, tmask, tslopes, tsink, accumulate_type(q))
        return library.jvp(tensors, **DEFAULTS | options)

    def attention_double_backward(dout, dlse, tq, tk, tv, tmask, tslopes, tsink, q, k, v, mask, slopes, sink, rng_state,
                                  key_mask, out, lse, t_out, t_lse, grad_mask=None, **options):  # fmt: skip
        tensors = inputs(q, k, v, mask, slopes, sink, rng_state, key_mask) | cotangents(dout, dlse, out)
        tq, tk, tv = (zeros_like_one_row(x) if t is None else t for t, x in ((tq, q), (tk, k), (tv, v)))
        tensors |= tangents(tq, tk, tv, tmask, tslopes, tsink, accumulate_type(q))
        tensors |= {
            "out": to_kernel_layout(out),
            "lse": lse,
            "t_out": to_kernel_layout(t_out),
            "t_lse": t_lse.contiguous(),
        }
        wanted = dict(zip(DIFFERENTIABLE, grad_mask, strict=True))
        return as_results(library.double_backward(tensors, wanted, **DEFAULTS | options), slopes, sink)

    def weights_inputs(q, k, mask, slopes, sink, rng_state, key_mask, lse):
        tensors = inputs(q, k, k[..., :0], mask, slopes, sink, rng_state, key_mask)  # a value without columns
        return tensors | {"out": q[..., :0], "lse": lse.contiguous()}

    def attention_weights(q, k, mask, slopes, sink, rng_state, key_mask, lse, **options):
        return library.weights(weights_inputs(q, k, mask, slopes, sink, rng_state, key_mask, lse), **DEFAULTS | options)

    def attention_weights_backward(
        dweights, q, k, mask, slopes, sink, rng_state, key_mask, lse, grad_mask=None, **options
    ):
        tensors = weights_inputs(q, k, mask, slopes, sink, rng_state, key_mask, lse)
        tensors |= {"dweights": to_kernel_layout(dweights), "dout": tensors["out"], "dlse": None}
        wanted = dict(zip(DIFFERENTIABLE, grad_mask, strict=True))
        return as_results(library.backward(tensors, wanted, **DEFAULTS | options), slopes, sink)

    operators = (
        attention, attention_backward, attention_jvp, attention_double_backward, attention_weights,
        attention_weights_backward,
    )  # fmt: skip
    with registered(dropout_mask=library.dropout_mask, **{f.__name__: f for f in operators}):
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
    """As as_cpu_kernels(), of a library whose selector sees a Hopper GPU."""
    loaded = Library(path, **options)
    loaded.num_splits = num_splits
    with loaded.on_gpu(9, 0), as_cpu_kernels(loaded):
        yield loaded
