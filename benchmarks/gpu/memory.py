"""Peak memory of one training step against S, from torch's allocator, with each method in a separate process.

B 1, H 8, D 64, bfloat16, or float16 on GPUs without bfloat16. Inputs are allocated before and do not count. Results and
temporary memory count.
"""

import argparse
from collections.abc import Iterator

import torch

from benchmarks import output, peak_memory
from benchmarks.attention_methods import Case
from benchmarks.gpu import needs
from benchmarks.gpu.timing import name_of_dtype_16

LENGTHS = [2048, 16384, 65536]
METHODS = ["ours", "torch flash", "torch efficient", "torch cudnn", "standard"]
LONGEST_STANDARD = 16384  # it stores the scores


def measure(method: str, length: int) -> dict:
    row = {"method": method, "S": length}
    if method == "standard" and length > LONGEST_STANDARD:
        return row | {"bytes": None, "why": "would store the scores"}
    try:
        size = peak_memory.measure(Case(method, 1, 8, length, 64, name_of_dtype_16(), device="cuda"))
    except RuntimeError as error:
        return row | {"bytes": None, "why": str(error).strip().splitlines()[-1]}
    return row | {"bytes": size, "why": "" if size is not None else "out of memory"}


def text(record: dict) -> Iterator:
    yield f"{record['machine']}; peak MiB of forward + backward, B 1, H 8, D 64, {record['dtype']}\n"
    found = {(row["method"], row["S"]): row["bytes"] for row in record["rows"]}
    lengths = sorted({row["S"] for row in record["rows"]})
    lines = [[method, *(mebibytes(found.get((method, length))) for length in lengths)] for method in METHODS]
    yield output.table(["S", *map(str, lengths)], lines)
    yield from sorted({f"{row['method']}: {row['why']}" for row in record["rows"] if row["why"]})


def mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.1f}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two lengths only")
    output.add_arguments(parser)
    args = parser.parse_args(argv)
    needs.a_gpu_and_our_build()
    record = {"machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}", "dtype": name_of_dtype_16()}
    record["rows"] = []
    for length in LENGTHS[:2] if args.quick else LENGTHS:
        for method in METHODS:
            record["rows"].append(measure(method, length))
            output.write_json(record, args.json)
    output.write_text(text(record), args.text)


if __name__ == "__main__":
    main()
