"""Compares packed sequences and caches with calls that need neither, alternating in one process.

    python -m benchmarks.packed            training: forward and backward of packs of different lengths
    python -m benchmarks.packed --decode   a decode step: contiguous caches, pages, 8 bits

Training: compares flash_attn_varlen with three other ways. They are its sequences one by one, flash_attn on the padded
batch with a mask, and torch's scaled_dot_product_attention on the padded batch. Decoding: compares with a plain read of
K and V, and with torch's attention on a contiguous cache. If AMD's plugin is installed for this torch, zentorch's
attention is compared, too. A number is the other time divided by the time of flash_attn_ext: above 1, flash_attn_ext is
faster.
"""

import argparse
import importlib.util
from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import flash_attn_ext
from benchmarks import peaks
from benchmarks.harness import environment, machine, quartiles, time_in_turn
from flash_attn_ext import flash_attn, flash_attn_varlen, flash_attn_with_kvcache

HEADS, HEAD_DIM = 8, 64


def distributions(longest: int) -> dict[str, list[int]]:
    """Returns the lengths of the sequences of a pack."""
    uniform = torch.Generator().manual_seed(0)
    return {
        "uniform": torch.randint(1, longest + 1, (8,), generator=uniform).tolist(),
        "one long, many short": [longest] + [longest // 32] * 32,
        "half padding": [longest, longest // 4, longest // 2, longest // 4] * 2,
        "all equal": [longest // 2] * 8,
    }


def training(lengths: list[int], dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Returns functions for forward and backward, causal. "packed" is flash_attn_varlen."""
    rows, longest, batch = sum(lengths), max(lengths), len(lengths)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    packed = [torch.randn(rows, HEADS, HEAD_DIM, dtype=dtype, requires_grad=True) for _ in range(3)]
    padded = [torch.randn(batch, HEADS, longest, HEAD_DIM, dtype=dtype, requires_grad=True) for _ in range(3)]
    keep = (torch.arange(longest) < torch.tensor(lengths)[:, None])[:, None, None]
    causal = keep & torch.ones(longest, longest, dtype=torch.bool).tril()

    def step(attention: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> None:
        out = attention()
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    def alone() -> None:
        for begin, end in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False):
            own = [t[begin:end].transpose(0, 1)[None] for t in packed]
            step(partial(flash_attn, *own, is_causal=True), own)

    return {
        "packed": partial(
            step, partial(flash_attn_varlen, *packed, cu_seqlens, cu_seqlens, longest, longest, is_causal=True), packed
        ),
        "its sequences one by one": alone,
        "padded, ours": partial(step, partial(flash_attn, *padded, keep, is_causal=True), padded),
        "padded, torch": partial(step, partial(sdpa, *padded, causal), padded),
    }


def decoding(
    batch: int, heads_kv: int, length: int, dtype: torch.dtype
) -> tuple[dict[str, Callable[[], object]], torch.Tensor]:
    """Returns functions for one new token of each sequence, and K and V. "contiguous" is ours without pages."""
    head_dim = 128
    q = torch.randn(batch, 1, 32, head_dim).to(dtype)
    kv = torch.randn(2, batch, length, heads_kv, head_dim).to(dtype)
    lengths = torch.full((batch,), length, dtype=torch.int32)
    calls = {"contiguous": partial(flash_attn_with_kvcache, q, *kv, cache_seqlens=lengths)}
    for page_size in (16, 256):
        pages = length // page_size
        table = torch.randperm(batch * pages).int().view(batch, pages)
        paged = kv.clone().view(2, batch * pages, page_size, heads_kv, head_dim)  # no other call has just read it
        calls[f"pages of {page_size}"] = partial(
            flash_attn_with_kvcache, q, *paged, cache_seqlens=lengths, block_table=table
        )
    scale = torch.full((heads_kv,), 0.03)
    for name in ("int8", "float8_e4m3fn", "float8_e5m2"):
        coded = (kv.float() / 0.03).clamp(-127, 127).to(getattr(torch, name))
        calls[name] = partial(
            flash_attn_with_kvcache, q, *coded, cache_seqlens=lengths, k_descale=scale, v_descale=scale
        )
    gathered = [t.transpose(1, 2) for t in kv]
    calls["torch"] = partial(sdpa, q.transpose(1, 2), *gathered, enable_gqa=True)
    if importlib.util.find_spec("zentorch"):
        importlib.import_module("zentorch")
        calls["zentorch"] = partial(torch.ops.zentorch.zentorch_sdpa, q.transpose(1, 2), *gathered)
    return calls, kv


def show(title: str, calls: dict[str, Callable[[], object]], seconds: float, kv: torch.Tensor | None = None) -> None:
    reads = []  # seconds of reading K and V once, by loads only

    def read() -> None:
        if kv is not None:
            rate = peaks.stream_read(kv, flash_attn_ext.active_kernel(), torch.get_num_threads())
            reads.append(kv.numel() * kv.element_size() / rate)

    times = time_in_turn(list(calls.values()), seconds=seconds, rounds=(5, 200), shuffle=True, between=read)
    first = next(iter(calls))
    print(f"{title}: {first} {quartiles(times[0])[1] * 1e3:.2f} ms")
    for name, other in zip(list(calls)[1:], times[1:], strict=True):
        low, middle, high = quartiles([o / ours for ours, o in zip(times[0], other, strict=True)])
        print(f"  {name:26} {middle:6.2f}  ({low:.2f} to {high:.2f})")
    if reads:
        low, middle, high = quartiles([o / ours for ours, o in zip(times[0], reads, strict=True)])
        print(f"  {'a plain read':26} {middle:6.2f}  ({low:.2f} to {high:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--longest", type=int, default=2048, help="the longest sequence, or the cache's length")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each row")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    options = parser.parse_args()
    torch.manual_seed(0)
    print(machine() | environment())
    for name in options.dtypes:
        dtype = getattr(torch, name)
        if options.decode:
            with torch.no_grad():
                for batch, heads_kv in ((1, 8), (8, 8), (4, 32)):
                    calls, kv = decoding(batch, heads_kv, options.longest, dtype)
                    title = f"decode, {name}, batch {batch}, 32/{heads_kv} heads, {options.longest} keys"
                    show(title, calls, options.seconds, kv)
        else:
            for kind, lengths in distributions(options.longest).items():
                show(f"training, {name}, {kind}, {sum(lengths)} rows", training(lengths, dtype), options.seconds)


if __name__ == "__main__":
    main()
