"""What the AMX kernels can reach on an Intel Xeon, from a count of their instructions: no such CPU was there to time.

For one tile of each pass (48 queries by 64 keys forward, 64 by 64 backward, 16 query heads of one key head by 64 keys
decoding) the emulation of tests/cpp counts products, loads and stores of tile registers. The model turns them into
cycles by Intel's own numbers (64 and IA-32 Architectures Optimization Reference Manual, chapter on AMX, Sapphire
Rapids): the units work side by side, so the slowest decides.

The softmax runs on vectors meanwhile. Its operations are counted by hand from the algorithm's text, two in a cycle. How
much of it hides behind the products is not known before a run: the last two columns say what nothing and everything
would give. They leave out packing, out and lse, and memory (which decoding waits for), so both are upper bounds.
"""

import argparse
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "amx_model"
NEEDS_BFLOAT16 = 77  # exit status of tile_counts

HEAD_DIMS = [32, 64, 80, 96, 128, 192, 256]

# Cycles from one such instruction to the next.
PRODUCT, LOAD, STORE = 16, 8, 16
FLOPS_OF_PRODUCT = 2 * 16 * 16 * 32

# Rows by keys of a tile, matrix products of it, and vector operations for 16 of its scores: the maximum, and e^x with
# its sum; the backward has dS instead of the maximum.
TILES = {"forward": (48, 64, 2, 14), "backward": (64, 64, 5, 18), "decode": (16, 64, 2, 14)}
VECTOR_OPERATIONS_A_CYCLE = 2


@dataclass(frozen=True)
class Step:
    """One tile of a pass at a head dimension, with the tile instructions that it takes."""

    name: str
    head_dim: int
    products: int
    loads: int
    stores: int

    @property
    def cycles(self) -> int:
        """Of the tile registers' slowest unit."""
        return max(PRODUCT * self.products, LOAD * self.loads, STORE * self.stores)

    @property
    def softmax_cycles(self) -> float:
        rows, keys, _, operations = TILES[self.name]
        return rows * keys / 16 * operations / VECTOR_OPERATIONS_A_CYCLE

    def fraction_of_peak(self, cycles: float) -> float:
        """Of the products' peak, for the FLOPs that the algorithm needs: padding does not count."""
        rows, keys, matrix_products, _ = TILES[self.name]
        return 2 * rows * keys * self.head_dim * matrix_products / FLOPS_OF_PRODUCT * PRODUCT / cycles


def count(head_dims: list[int]) -> list[Step]:
    """Runs the kernels on the emulation. RuntimeError where it cannot be built, or this CPU cannot run it."""
    program = BUILD / "tile_counts"
    jobs = f"-j{len(os.sched_getaffinity(0))}"
    made = subprocess.run(
        ["make", jobs, "-C", ROOT / "tests/cpp", f"BUILD={BUILD}", program], capture_output=True, text=True
    )
    if made.returncode != 0:
        raise RuntimeError(made.stderr)
    done = subprocess.run([program, *map(str, head_dims)], capture_output=True, text=True)
    if done.returncode == NEEDS_BFLOAT16:
        raise RuntimeError(done.stdout.strip())
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
        beside = s.fraction_of_peak(max(s.cycles, s.softmax_cycles))
        numbers = [s.head_dim, s.products, s.loads, s.stores, s.cycles, round(s.softmax_cycles)]
        result.add_row(s.name, *map(str, numbers), f"{after:.0%}", f"{beside:.0%}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=int, nargs="+", default=HEAD_DIMS)
    Console(width=120).print(table(count(parser.parse_args().head_dims)))


if __name__ == "__main__":
    main()
