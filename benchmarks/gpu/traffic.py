"""Bytes between the GPU and its memory in one training step of GPT-2 medium's attention, by Nsight Compute.

B 64, H 16, S 1024, D 64, float16: the case of the FlashAttention paper (2022, figure 2 left). The paper has 40.3 GB for
standard attention and 4.4 GB for FlashAttention, on an A100 with dropout and a causal mask.
"""

import argparse
from collections.abc import Iterator

import torch

from benchmarks import output
from benchmarks.attention_methods import Case
from benchmarks.dram_traffic import Unavailable
from benchmarks.dram_traffic import measure as dram_bytes
from benchmarks.gpu import needs

METHODS = ["ours", "standard", "torch flash"]
BATCH, HEADS, LENGTH, HEAD_DIM = 64, 16, 1024, 64


def least_bytes(batch: int) -> int:
    """The forward reads q, k, v and writes out. The backward reads all and dout, and writes 3 gradients. 16 bits."""
    return (4 + 5 + 3) * batch * HEADS * LENGTH * HEAD_DIM * 2


def measure(method: str, batch: int, causal: bool, dropout_p: float) -> dict:
    case = Case(method, batch, HEADS, LENGTH, HEAD_DIM, "float16", causal, dropout_p, device="cuda")
    row = {"method": method, "causal": causal, "dropout_p": dropout_p}
    try:
        return row | {"bytes": dram_bytes(case), "why": ""}
    except Unavailable as reason:
        needs.skip(str(reason))
    except RuntimeError as error:
        return row | {"bytes": None, "why": str(error).strip().splitlines()[-1]}


def text(record: dict) -> Iterator:
    yield f"{record['machine']}; forward + backward, B {record['B']}, H {HEADS}, S {LENGTH}, D {HEAD_DIM}, float16"
    yield f"Each input read once and each result written once: {record['least_bytes'] / 1e9:.2f} GB\n"
    lines = [
        [
            f"{row['method']}, {'causal, dropout ' + str(row['dropout_p']) if row['causal'] else 'plain'}",
            row["why"] if row["bytes"] is None else f"{row['bytes'] / 1e9:.2f}",
        ]
        for row in record["rows"]
    ]
    yield output.table(["", "GB by the counters"], lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="B 8 instead of 64")
    output.add_arguments(parser)
    args = parser.parse_args(argv)
    needs.a_gpu_and_our_build()
    batch = 8 if args.quick else BATCH
    record = {
        "machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
        "B": batch,
        "least_bytes": least_bytes(batch),
        "rows": [],
    }
    for method in METHODS:
        for causal, dropout_p in ((False, 0.0), (True, 0.1)):
            record["rows"].append(measure(method, batch, causal, dropout_p))
            output.write_json(record, args.json)
    output.write_text(text(record), args.text)


if __name__ == "__main__":
    main()
