"""Predicts the speed of the AMX kernels on an Intel Xeon from counts of their instructions.

The prediction is far too optimistic: the measured forward reaches a third or less of the predicted fraction of peak
(docs/kernels.md).

The emulation of tests/cpp counts products, loads and stores of tile registers for one tile of each pass. A tile of the
forward has 48 queries and 64 keys, of the backward 64 and 64, of decoding 16 query heads of a key head and 64 keys. The
model converts the counts to cycles with Intel's numbers (64 and IA-32 Architectures Optimization Reference Manual,
chapter on AMX, Sapphire Rapids). The units work in parallel, so the slowest unit determines the time.

The softmax runs on vectors at the same time. Its operations are counted by hand from the algorithm, two per cycle. The
model does not know how much of the softmax runs during the products. The last two columns are the speeds if none of it
does, and if all of it does. They exclude packing, out and lse, and memory, which limits decoding. So both are upper
bounds.
"""

import argparse
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flash_attn_ext import available_kernels

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "amx_model"

HEAD_DIMS = [32, 64, 80, 96, 128, 192, 256]

# Cycles between two instructions of the same kind.
PRODUCT, LOAD, STORE = 16, 8, 16
FLOPS_OF_PRODUCT = 2 * 16 * 16 * 32

# Rows and keys of a tile, its matrix products, and vector operations for 16 scores: the maximum, and e^x with its sum.
# The backward has dS instead of the maximum.
TILES = {"forward": (48, 64, 2, 14), "backward": (64, 64, 5, 18), "decode": (16, 64, 2, 14)}
VECTOR_OPERATIONS_A_CYCLE = 2


@dataclass(frozen=True)
class Step:
    """One tile of a pass at a head dimension, and the numbers of its tile instructions."""

    name: str
    head_dim: int
    products: int
    loads: int
    stores: int

    @property
    def cycles(self) -> int:
        """Returns the cycles of the slowest unit of the tile registers."""
        return max(PRODUCT * self.products, LOAD * self.loads, STORE * self.stores)

    @property
    def softmax_cycles(self) -> float:
        rows, keys, _, operations = TILES[self.name]
        return rows * keys / 16 * operations / VECTOR_OPERATIONS_A_CYCLE

    def fraction_of_peak(self, cycles: float) -> float:
        """Returns the fraction of the products' peak. Only FLOPs of the algorithm count, not padding."""
        rows, keys, matrix_products, _ = TILES[self.name]
        return 2 * rows * keys * self.head_dim * matrix_products / FLOPS_OF_PRODUCT * PRODUCT / cycles


def count(head_dims: list[int]) -> list[Step]:
    """Runs the kernels in the emulation. Raises RuntimeError if it cannot be built or this CPU cannot run it."""
    if "avx512_bf16" not in available_kernels():
        raise RuntimeError("needs a CPU with AVX-512 BF16, on which AMX is emulated")
    program = BUILD / "tile_counts"
    jobs = f"-j{len(os.sched_getaffinity(0))}"
    made = subprocess.run(
        ["make", jobs, "-C", ROOT / "tests/cpp", f"BUILD={BUILD}", program], capture_output=True, text=True
    )
    if made.returncode != 0:
        raise RuntimeError(made.stderr)
    done = subprocess.run([program, *map(str, head_dims)], capture_output=True, text=True)
    done.check_returncode()
    rows = [line.split() for line in done.stdout.splitlines()]
    return [Step(name, *map(int, numbers)) for name, *numbers in rows]


def table(steps: list[Step]) -> Table:
    result = Table(title="Tile instructions and cycles of one tile, by the model")
    for column in ("pass", "D", "products", "loads", "stores", "tile cycles", "softmax cycles"):
        result.add_column(column, justify="left" if column == "pass" else "right")
    for column in ("of peak, one after the other", "side by side"):
        result.add_column(column, justify="right")
    for s in sorted(steps, key=lambda s: list(TILES).index(s.name)):
        after = s.fraction_of_peak(s.cycles + s.softmax_cycles)
        overlapped = s.fraction_of_peak(max(s.cycles, s.softmax_cycles))
        numbers = [s.head_dim, s.products, s.loads, s.stores, s.cycles, round(s.softmax_cycles)]
        result.add_row(s.name, *map(str, numbers), f"{after:.0%}", f"{overlapped:.0%}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=int, nargs="+", default=HEAD_DIMS)
    Console(width=120).print(table(count(parser.parse_args().head_dims)))


if __name__ == "__main__":
    main()
