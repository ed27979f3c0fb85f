"""Reads text without a download: the sources of the Python standard library."""

import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Excluded: tests (repetitive), generated tables (not a language), installed packages (not the standard library).
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "turtledemo", "encodings", "pydoc_data"}
SKIPPED_FOLDERS |= {"site-packages", "dist-packages", "__pycache__"}

VOCABULARY = 2048
FILE_START = b"\0"  # a byte that no Python source may contain
PIECE = re.compile(rb" ?[A-Za-z_]+|\n *|[^A-Za-z_\n]")  # a word with the space before it, an indentation, or one byte


def source_files() -> list[Path]:
    """Returns the library's .py files, in an order that does not depend on the file system."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (path for path in root.rglob("*.py") if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts))
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


class Tokenizer:
    """Converts bytes to tokens and back. The pieces that save most bytes have one token.

    Other text is encoded as bytes.
    """

    def __init__(self, text: bytes) -> None:
        counts = Counter(PIECE.findall(text))
        saved = {piece: count * (len(piece) - 1) for piece, count in counts.items() if len(piece) > 1}
        best = sorted(saved, key=lambda piece: (-saved[piece], piece))[: VOCABULARY - 256]
        self.pieces = [bytes([n]) for n in range(256)] + best
        self._token = {piece: token for token, piece in enumerate(self.pieces)}
        self.pieces += [b""] * (VOCABULARY - len(self.pieces))  # a short text has fewer

    def encode(self, text: bytes) -> Tensor:
        """Returns int16, one dimension."""
        tokens: list[int] = []
        for piece in PIECE.findall(text):
            token = self._token.get(piece)
            if token is None:
                tokens.extend(piece)
            else:
                tokens.append(token)
        return torch.tensor(tokens, dtype=torch.int16)

    def decode(self, tokens: Iterable[int]) -> bytes:
        return b"".join(self.pieces[token] for token in tokens)


@dataclass
class Corpus:
    """The tokens of two sets of files, and their tokenizer."""

    train: Tensor
    validation: Tensor
    tokenizer: Tokenizer
    files: int

    def description(self) -> str:
        train, validation = len(self.train), len(self.validation)
        return f"{self.files} files: {train:,} tokens for training, {validation:,} for validation"


def load_corpus() -> Corpus:
    """Reads the library. Every tenth file is for validation."""
    texts = [FILE_START + path.read_bytes() for path in source_files()]
    if len(texts) < 10:
        folder = sysconfig.get_paths()["stdlib"]
        raise FileNotFoundError(f"{folder} has only {len(texts)} .py files: is the library zipped?")
    train = b"".join(text for index, text in enumerate(texts) if index % 10 != 9)
    return as_corpus(train, b"".join(texts[9::10]), len(texts))


def as_corpus(train: bytes, validation: bytes, files: int) -> Corpus:
    tokenizer = Tokenizer(train)
    return Corpus(tokenizer.encode(train), tokenizer.encode(validation), tokenizer, files)


Batch = tuple[Tensor, Tensor]  # inputs and targets, each (batch_size, context), int64


def random_windows(tokens: Tensor, batch_size: int, context: int, seed: int) -> Iterator[Batch]:
    """Yields endless batches at random positions. The same seed gives the same batches."""
    if len(tokens) <= context:
        raise ValueError(f"context is {context}, but this part of the text has only {len(tokens)} tokens")
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - context, (batch_size, 1), generator=generator)
        windows = tokens[starts + torch.arange(context + 1)].long()
        yield windows[:, :-1], windows[:, 1:]
