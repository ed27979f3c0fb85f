"""The tiles of the score matrix that a process computes with the keys of another process."""

from bisect import bisect_left, bisect_right
from functools import lru_cache
from typing import NamedTuple

from ._layout import Layout


class Band(NamedTuple):
    """Key j is visible to query i of the sequence if -left <= j - (i + diagonal) <= right (None: no limit).

    Both must be in one chunk, too: floor((i + diagonal + first_key) / chunk) == floor((j + first_key) / chunk).
    """

    left: int | None
    right: int | None
    diagonal: int
    chunk: int = 0  # 0: no chunks
    first_key: int = 0

    def chunk_of(self, position: int) -> tuple[int, int]:
        """Returns the first position of the chunk of ``position``, and of the next chunk."""
        begin = position - (position + self.first_key) % self.chunk
        return begin, begin + self.chunk


class Geometry(NamedTuple):
    """The values that decide which process computes which tile. They are the same on every process."""

    queries: Layout
    keys: Layout
    band: Band
    documents: tuple[int, ...] | None  # cu_seqlens: the start of each document, and the end of the last one
    # True if scores depend on positions only by the band: no ALiBi, no dropout, no mask with columns.
    depends_on_band_only: bool


class Tile(NamedTuple):
    """Rows [q_begin, q_end) of this process's queries, and rows [k_begin, k_end) of its current keys."""

    q_begin: int
    q_end: int
    k_begin: int
    k_end: int
    diagonal: int  # query i of the tile has the position of its key i + diagonal
    bounded: bool  # whether the band cuts the tile
    row: int = 0  # the number of the first query in its document
    col: int = 0  # the number of the first key in its document
    key: int = 0  # the number of the first key in the whole sequence, which is its column of the mask
    document: int = 0  # number of the (first) document
    # several whole documents: the start of each document in the tile, and the end
    lengths: tuple[int, ...] | None = None


def tiles_with_keys_of(geometry: Geometry, rank: int, owner: int) -> tuple[Tile, ...]:
    """Returns the tiles of process ``rank`` with the keys of process ``owner``, in the order of the merges."""
    return _tiles(geometry, tuple(geometry.queries.pieces(rank)), tuple(geometry.keys.pieces(owner)))


def all_tiles(geometry: Geometry, rank: int) -> tuple[Tile, ...]:
    """Returns the tiles of process ``rank`` with all keys, in the order of the sequence."""
    return _tiles(geometry, tuple(geometry.queries.pieces(rank)), ((0, geometry.keys.seqlen, 0),))


@lru_cache(maxsize=256)
def needed_distances(geometry: Geometry) -> tuple[int, ...]:
    """Returns every distance t, from 0 on, for which a process r needs the keys of process r - t."""
    processes = geometry.queries.processes
    needed = (
        any(tiles_with_keys_of(geometry, r, (r - t) % processes) for r in range(processes)) for t in range(processes)
    )
    return tuple(t for t, some in enumerate(needed) if some or t == 0)


@lru_cache(maxsize=4096)
def _tiles(geometry: Geometry, queries: tuple, keys: tuple) -> tuple[Tile, ...]:
    tiles = []
    for q0, q1, q_local in queries:
        for k0, k1, k_local in keys:
            for tile in _tiles_of_chunks(geometry, (q0, q1), (k0, k1)):
                tiles.append(
                    tile._replace(
                        q_begin=tile.q_begin - q0 + q_local, q_end=tile.q_end - q0 + q_local,
                        k_begin=tile.k_begin - k0 + k_local, k_end=tile.k_end - k0 + k_local,
                    )
                )  # fmt: skip
    return tuple(_join_tiles(tiles) if geometry.depends_on_band_only else tiles)


def _tiles_of_chunks(geometry: Geometry, queries: tuple[int, int], keys: tuple[int, int]) -> list[Tile]:
    """Returns the tiles of one chunk of queries and one chunk of keys, in rows of the whole sequence."""
    if geometry.documents is None:
        tile = _tile(geometry.band, queries, keys, (0, 0), 0)
        return [] if tile is None else [tile]
    tiles: list[Tile] = []
    whole: list[int] = []  # consecutive documents, each of them inside both chunks

    def flush() -> None:
        if whole:
            tiles.append(_packed_tile(geometry, whole))
            whole.clear()

    offsets = geometry.documents
    first = bisect_right(offsets, max(queries[0], keys[0])) - 1  # the first document with rows in both chunks
    end_document = min(bisect_left(offsets, min(queries[1], keys[1])), len(offsets) - 1)
    for number in range(max(first, 0), end_document):
        begin, end = offsets[number : number + 2]
        seen = [(max(begin, lo), min(end, hi)) for lo, hi in (queries, keys)]
        if begin == end or any(lo >= hi for lo, hi in seen):
            continue
        if seen[0] == seen[1] == (begin, end):
            whole.append(number)
            continue
        flush()
        tile = _tile(geometry.band, *seen, (begin, begin), number)
        if tile is not None:
            tiles.append(tile)
    flush()
    return tiles


def _tile(
    band: Band, queries: tuple[int, int], keys: tuple[int, int], origin: tuple[int, int], document: int
) -> Tile | None:
    """Returns the visible part of these rows and keys, or None if no part is visible."""
    (q0, q1), (k0, k1) = queries, keys
    if q0 >= q1 or k0 >= k1:
        return None
    if band.left is not None:
        k0 = max(k0, q0 + band.diagonal - band.left)
        q1 = min(q1, k1 - 1 - band.diagonal + band.left + 1)
    if band.right is not None:
        k1 = min(k1, q1 - 1 + band.diagonal + band.right + 1)
        q0 = max(q0, k0 - band.diagonal - band.right)
    if q0 >= q1 or k0 >= k1:
        return None
    cut = False
    if band.chunk:
        # Positions count from the start of the document.
        row, col = origin[0] - band.diagonal, origin[1]
        k0 = max(k0, band.chunk_of(q0 - row)[0] + col)
        k1 = min(k1, band.chunk_of(q1 - 1 - row)[1] + col)
        if k0 >= k1:
            return None
        q0 = max(q0, band.chunk_of(k0 - col)[0] + row)
        q1 = min(q1, band.chunk_of(k1 - 1 - col)[1] + row)
        if q0 >= q1:
            return None
        cut = len({band.chunk_of(p) for p in (q0 - row, q1 - 1 - row, k0 - col, k1 - 1 - col)}) > 1
    diagonal = band.diagonal + q0 - k0
    least, most = -(q1 - q0 - 1 + diagonal), k1 - k0 - 1 - diagonal  # of j - (i + diagonal)
    bounded = cut or (band.left is not None and least < -band.left) or (band.right is not None and most > band.right)
    return Tile(q0, q1, k0, k1, diagonal, bounded, q0 - origin[0], k0 - origin[1], k0, document)


def _packed_tile(geometry: Geometry, numbers: list[int]) -> Tile:
    """Returns one tile of several whole documents. Each document attends to itself."""
    offsets = geometry.documents[numbers[0] : numbers[-1] + 2]
    begin, end = offsets[0], offsets[-1]
    lengths = tuple(offset - begin for offset in offsets)
    diagonal = geometry.band.diagonal
    return Tile(begin, end, begin, end, diagonal, True, key=begin, document=numbers[0], lengths=lengths)


def _join_tiles(tiles: list[Tile]) -> list[Tile]:
    """Joins neighbouring tiles that the band does not cut, for fewer and larger calls."""
    for rows, columns in (
        ((0, 1), (2, 3)),
        ((2, 3), (0, 1)),
    ):  # the same queries and consecutive keys, or the same keys and consecutive queries
        result: list[Tile] = []
        for tile in tiles:
            last = result[-1] if result else None
            if (
                last is not None
                and not (last.bounded or tile.bounded or last.lengths or tile.lengths)
                and all(last[n] == tile[n] for n in rows)
                and last[columns[1]] == tile[columns[0]]
            ):
                field = Tile._fields[columns[1]]
                result[-1] = last._replace(**{field: tile[columns[1]]})
            else:
                result.append(tile)
        tiles = result
    return tiles
