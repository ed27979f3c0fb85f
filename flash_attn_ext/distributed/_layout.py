"""The rows of a sequence on each process."""

from typing import NamedTuple


class Layout(NamedTuple):
    """Cuts a sequence into chunks of nearly equal length: the first ``seqlen % chunks`` chunks have one row more.

    If balanced, n processes have 2 n chunks, and process r holds chunks r and 2 n - 1 - r ("zigzag", "head and tail").
    Under a causal mask an early chunk sees few keys and a late chunk sees many. So each process has an early and a late
    chunk. If not balanced, process r holds chunk r of n. The rows of a process are in the order of the sequence.
    """

    seqlen: int
    processes: int
    balanced: bool

    @property
    def chunks(self) -> int:
        return self.processes * (2 if self.balanced else 1)

    def begin(self, chunk: int) -> int:
        size, longer = self.seqlen // self.chunks, self.seqlen % self.chunks
        return chunk * size + min(chunk, longer)

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        return (rank, self.chunks - 1 - rank) if self.balanced else (rank,)

    def holder(self, chunk: int) -> tuple[int, int]:
        """Returns the rank that holds a chunk, and the chunk's first row among the rows of that rank."""
        if not self.balanced or chunk < self.processes:
            return chunk, 0
        rank = self.chunks - 1 - chunk
        return rank, self.begin(rank + 1) - self.begin(rank)

    def pieces(self, rank: int) -> list[tuple[int, int, int]]:
        """Returns (begin, end, local) of each chunk: rows [begin, end) of the sequence, stored from row local on."""
        result, local = [], 0
        for chunk in self.chunks_of(rank):
            begin, end = self.begin(chunk), self.begin(chunk + 1)
            result.append((begin, end, local))
            local += end - begin
        return result

    def rows(self, rank: int) -> int:
        return sum(end - begin for begin, end, _ in self.pieces(rank))

    def max_rows(self) -> int:
        return max(self.rows(rank) for rank in range(self.processes))

    def in_order(self) -> list[tuple[int, int, int]]:
        """Returns (rank, begin, end) of each chunk in the order of the sequence: rows [begin, end) of that rank."""
        result = []
        for chunk in range(self.chunks):
            rank, local = self.holder(chunk)
            result.append((rank, local, local + self.begin(chunk + 1) - self.begin(chunk)))
        return result


def layout_of(name: str, rows: int, seqlen: int | None, rank: int, processes: int, balanced: bool) -> Layout:
    """Returns the layout of a sequence with ``rows`` on this process. Raises if no layout has this number of rows."""
    if seqlen is None:
        layout = Layout(rows * processes, processes, balanced)
        if layout.seqlen % layout.chunks:
            raise ValueError(
                f"{name}: got {rows} rows on process {rank}, and {processes} x {rows} rows do not divide into "
                f"{layout.chunks} equal chunks; allowed: seqlen=, the whole sequence's length, for unequal shards"
            )
        return layout
    layout = Layout(seqlen, processes, balanced)
    if layout.rows(rank) != rows:
        raise ValueError(
            f"{name}: got {rows} rows on process {rank} of {processes}; allowed: {layout.rows(rank)}, its share of "
            f"seqlen={seqlen} ({'balanced' if balanced else 'not balanced'}), as shard_sequence gives it"
        )
    return layout
