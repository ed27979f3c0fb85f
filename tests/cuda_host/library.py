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
    "why_not_sm80_forward", "why_not_sm80_backward", "why_not_sm90_forward",
    "why_not_sm90_backward",
)  # fmt: skip

i64, u64, f64, pointer = ctypes.c_int64, ctypes.c_uint64, ctypes.c_double, ctypes.c_void_p


def struct(name, base=ctypes.Structure, **fields):
    return type(name, (base,), {"_fields_": list(fields.items())})


# csrc/core/params.h, field by field; Library compares the sizes.
Sizes = struct("Sizes", **dict.fromkeys(
    ("batch", "heads", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"), i64
))  # fmt: skip
Tensor4 = struct("Tensor4", data=pointer, stride_b=i64, stride_h=i64, stride_s=i64)
Band = struct("Band", diagonal=i64, left=i64, right=i64)
MaskParams = struct(
    "MaskParams", data=pointer, dtype=ctypes.c_int8, stride_b=i64, stride_h=i64, stride_q=i64, stride_k=i64
)
AlibiParams = struct("AlibiParams", slopes=pointer, stride_b=i64, stride_h=i64)
SinkParams = struct("SinkParams", data=pointer, stride_b=i64, stride_h=i64)
DropoutParams = struct("DropoutParams", rng_state=pointer, threshold=u64, keep_scale=f64)
DecodeParams = struct("DecodeParams", num_splits=i64, has_unified_max=ctypes.c_bool, unified_max=f64)
Offsets = struct("Offsets", data=pointer, is_int64=ctypes.c_bool)
CacheScale = struct("CacheScale", data=pointer, stride_b=i64, stride_h=i64, stride_s=i64)
PageTable = struct("PageTable", pages=Offsets, count=i64, page_size=i64, num_pages=i64, sequence=i64)
CacheParams = struct(
    "CacheParams", batch_idx=Offsets, leftpad=Offsets, caches=i64, dtype=ctypes.c_int8, k_scale=CacheScale,
    v_scale=CacheScale, pages=PageTable, cache=i64,
)  # fmt: skip
VarlenParams = struct(
    "VarlenParams", cu_seqlens_q=Offsets, cu_seqlens_k=Offsets, seqused_q=Offsets, seqused_k=Offsets, total_q=i64,
    total_k=i64, lower_right=ctypes.c_bool, mask_by_row=ctypes.c_bool, first_q=i64, first_k=i64,
    cache=CacheParams,
)  # fmt: skip
AttentionParams = struct(
    "AttentionParams", dtype=ctypes.c_int8, sizes=Sizes, q=Tensor4, k=Tensor4, v=Tensor4, out=Tensor4, lse=pointer,
    scale=f64, softcap=f64, band=Band, mask=MaskParams, alibi=AlibiParams, sink=SinkParams, dropout=DropoutParams,
    decode=DecodeParams, varlen=VarlenParams,
)  # fmt: skip
MaskGrad = struct("MaskGrad", data=pointer, batch=i64, heads=i64, rows=i64, cols=i64)
BackwardParams = struct(
    "BackwardParams", AttentionParams, dout=Tensor4, dlse=pointer, dq=Tensor4, dk=Tensor4, dv=Tensor4, dmask=MaskGrad,
    dalibi_slopes=pointer, dsink=pointer, deterministic=ctypes.c_bool,
)  # fmt: skip


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
        self.recomputed_tiles = -1  # by the last backward, because they were not finite; -1: it was not sm80's
        self.c = ctypes.CDLL(str(path))
        for name in TEXTS:
            getattr(self.c, name).restype = ctypes.c_char_p
        for name in ("forward_workspace", "backward_workspace"):
            getattr(self.c, name).restype = ctypes.c_size_t
        for name in ("sm80_recomputed_tiles", "exponentials", "attributes_set", "driver_lookups"):
            getattr(self.c, name).restype = i64
        self.c.exp2_fast.argtypes, self.c.exp2_fast.restype = [ctypes.c_float], ctypes.c_float
        self.c.register_buffer.argtypes = [pointer, i64, i64, ctypes.c_char_p, ctypes.c_bool, ctypes.c_bool]
        self.c.seed_order.argtypes = [u64]
        assert self.c.attention_params_bytes() == ctypes.sizeof(AttentionParams)
        assert self.c.backward_params_bytes() == ctypes.sizeof(BackwardParams)
        self.seed_order(seed)

    @contextmanager
    def on_gpu(self, major, minor, code=GPU_CODE):
        """Inside, the selector sees a GPU of this compute capability, and a build with this code."""
        self.c.set_compute_capability(major, minor)
        self.c.set_gpu_code(code.encode())
        try:
            yield
        finally:
            self.c.set_compute_capability(8, 0)
            self.c.set_gpu_code(GPU_CODE.encode())

    def force_tier(self, tier):
        error = self.c.force_tier(tier.encode())
        if error is not None:
            raise ValueError(error.decode())

    def choice(self, params):
        """The tier that the selector takes, or, if none can run, the reason; and why each faster one does not."""
        select = self.c.backward_choice if isinstance(params, BackwardParams) else self.c.forward_choice
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
            k.shape[2] - q.shape[2] if options["lower_right"] else 0,
            UNBOUNDED if left < 0 else left,
            0 if options["causal"] else UNBOUNDED if right < 0 else right,
        )
        if mask is not None:
            strides = [0 if n == 1 else s for n, s in zip(mask.shape, mask.stride(), strict=True)]
            params.mask = MaskParams(mask.data_ptr(), DTYPES[mask.dtype], *strides)
        for name, field, kind in (("slopes", "alibi", AlibiParams), ("sink", "sink", SinkParams)):
            t = tensors.get(name)
            if t is not None:
                setattr(params, field, kind(t.data_ptr(), t.stride(0) if t.dim() == 2 else 0, t.stride(-1)))
        if options["dropout_p"] > 0:
            params.dropout = dropout_params(tensors["rng_state"], options["dropout_p"])
        unified_max = options["unified_max"]
        num_splits = options["num_splits"] or self.num_splits
        params.decode = DecodeParams(num_splits, unified_max is not None, unified_max or 0.0)
        return params

    def forward(self, tensors, **options):
        q, v = tensors["q"], tensors["v"]
        tensors["out"] = empty_in_order_of(q, v.shape[3])
        tensors["lse"] = torch.empty(q.shape[:3], dtype=accumulate_type(q))
        params = self.pack(AttentionParams(), tensors, options)
        workspace = empty_workspace(self.c.forward_workspace(ctypes.byref(params)))
        self.show({**tensors, "workspace": workspace}, ("out", "lse", "workspace"))
        self.check(self.c.forward(ctypes.byref(params), pointer(workspace.data_ptr())))
        return tensors["out"], tensors["lse"]

    def backward(self, tensors, wanted, **options):
        params = self.pack(BackwardParams(), tensors, options)
        params.deterministic = options["deterministic"] if self.deterministic is None else self.deterministic
        params.dout = tensor4(tensors["dout"])
        params.dlse = None if tensors["dlse"] is None else tensors["dlse"].data_ptr()
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
        workspace = empty_workspace(self.c.backward_workspace(ctypes.byref(params)))
        self.show({**tensors, **grads, "workspace": workspace}, (*grads, "workspace"))
        self.c.require_ordered_adds(params.deterministic)
        arguments = ctypes.byref(params), pointer(workspace.data_ptr())
        self.check(self.c.backward(*arguments))
        self.recomputed_tiles = self.c.sm80_recomputed_tiles(*arguments)
        for name in ("slopes", "sink"):
            if wanted[name] and tensors[name].dim() == 1:
                grads["d" + name] = grads["d" + name].sum(0)
        return grads

    def dropout_mask(self, rng_state, batch, heads, seqlen_q, seqlen_k, dropout_p):
        kept = torch.empty(batch, heads, seqlen_q, seqlen_k, dtype=torch.bool)
        self.show({"rng_state": rng_state, "kept": kept}, ("kept",))
        sizes = Sizes(batch, heads, heads, seqlen_q, seqlen_k, 1, 1)
        dropout = dropout_params(rng_state, dropout_p)
        self.check(self.c.dropout_mask(ctypes.byref(dropout), ctypes.byref(sizes), pointer(kept.data_ptr())))
        return kept


def tensor4(t):
    return Tensor4(t.data_ptr(), *t.stride()[:3])


def offsets(t):
    return Offsets(t.data_ptr(), t.dtype == torch.int64)


def empty_workspace(size):
    assert size % 4 == 0
    return torch.empty(size // 4, dtype=torch.float32)


def dropout_params(rng_state, p):
    return DropoutParams(rng_state.data_ptr(), round(math.ldexp(p, 32)), 1 / (1 - p) if p < 1 else 0.0)


def accumulate_type(t):
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def readable(t):
    return t if t.shape[-1] <= 1 or t.stride(-1) == 1 else t.contiguous()


def empty_in_order_of(like, last_dim):
    b, h, s, _ = like.shape
    if like.stride(1) < like.stride(2):
        return torch.empty(b, s, h, last_dim, dtype=like.dtype).transpose(1, 2)
    return torch.empty(b, h, s, last_dim, dtype=like.dtype)


DEFAULTS = {
    "scale": None, "causal": False, "lower_right": False, "window_left": -1, "window_right": -1, "softcap": 0.0,
    "dropout_p": 0.0, "num_splits": 0, "unified_max": None, "deterministic": False,
}  # fmt: skip


@contextmanager
def as_cpu_kernels(library):
    """Inside, flash_attn and its backward on CPU tensors run through the CUDA kernels' host build."""

    def inputs(q, k, v, mask, slopes, sink, rng_state):
        slopes, sink = (None if t is None else t.to(accumulate_type(q)) for t in (slopes, sink))
        tensors = {"q": readable(q), "k": readable(k), "v": readable(v)}
        return tensors | {"attn_mask": mask, "slopes": slopes, "sink": sink, "rng_state": rng_state}

    def attention(q, k, v, attn_mask=None, alibi_slopes=None, sink=None, rng_state=None, **options):
        return library.forward(inputs(q, k, v, attn_mask, alibi_slopes, sink, rng_state), **DEFAULTS | options)

    def attention_backward(dout, dlse, q, k, v, mask, slopes, sink, rng_state, out, lse, grad_mask=None, **options):
        tensors = inputs(q, k, v, mask, slopes, sink, rng_state) | {"out": readable(out), "lse": lse}
        tensors["dout"] = torch.zeros(1, 1, 1, out.shape[3], dtype=out.dtype).expand_as(out)
        if dout is not None:
            tensors["dout"] = readable(dout)
        tensors["dlse"] = None if dlse is None else dlse.contiguous()
        wanted = dict(zip(("q", "k", "v", "attn_mask", "slopes", "sink"), grad_mask, strict=True))
        grads = library.backward(tensors, wanted, **DEFAULTS | options)
        for name, t in (("dslopes", slopes), ("dsink", sink)):
            if name in grads:
                grads[name] = grads[name].to(t.dtype)
        return tuple(grads.get(name) for name in ("dq", "dk", "dv", "dmask", "dslopes", "dsink"))

    registration = torch.library.Library("flash_attn_ext", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*[Oo]verrid")
        registration.impl("attention", attention, "CPU")
        registration.impl("attention_backward", attention_backward, "CPU")
        registration.impl("dropout_mask", library.dropout_mask, "CPU")
    try:
        yield library
    finally:
        registration._destroy()
