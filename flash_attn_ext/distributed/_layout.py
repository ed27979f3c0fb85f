"""Which rows of a sequence each process holds."""

from typing import NamedTuple


class Layout(NamedTuple):
    """A sequence cut into chunks, as equal as they can be: the first ``seqlen % chunks`` have one row more.

    Balanced, n processes have 2 n chunks, and process r holds chunks r and 2 n - 1 - r ("zigzag", "head and tail"):
    under a causal mask an early chunk sees little and a late one much, and each process has one of both. Otherwise
    process r holds chunk r of n. The rows of a process lie in the order of the sequence.
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
        """(rank, first row among that rank's rows) of a chunk."""
        if not self.balanced or chunk < self.processes:
            return chunk, 0
        rank = self.chunks - 1 - chunk
        return rank, self.begin(rank + 1) - self.begin(rank)

    def pieces(self, rank: int) -> list[tuple[int, int, int]]:
        """(first row of the sequence, behind its last row, first row among the rank's own) of each of its chunks."""
        result, local = [], 0
        for chunk in self.chunks_of(rank):
            begin, end = self.begin(chunk), self.begin(chunk + 1)
            result.append((begin, end, local))
            local += end - begin
        return result

    def rows(self, rank: int) -> int:
        return sum(end - begin for begin, end, _ in self.pieces(rank))

    def most_rows(self) -> int:
        return max(self.rows(rank) for rank in range(self.processes))

    def in_order(self) -> list[tuple[int, int, int]]:
        """(rank, first and behind the last of its own rows) of each chunk, in the order of the sequence."""
        result = []
        for chunk in range(self.chunks):
            rank, local = self.holder(chunk)
            result.append((rank, local, local + self.begin(chunk + 1) - self.begin(chunk)))
        return result


def layout_of(name: str, rows: int, seqlen: int | None, rank: int, processes: int, balanced: bool) -> Layout:
    """The layout of a sequence of which this process holds ``rows``; a ValueError where that cannot be its share."""
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
