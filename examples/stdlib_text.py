"""Real text without a download: the sources of the Python standard library that runs this very file."""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Tests repeat themselves, generated tables are no language, installed packages are not the standard library.
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "turtledemo", "encodings", "pydoc_data"}
SKIPPED_FOLDERS |= {"site-packages", "dist-packages", "__pycache__"}

VOCABULARY = 256  # a token is a byte
FILE_START = b"\0"  # a byte that no Python source may contain


def source_files() -> list[Path]:
    """The library's .py files, in an order that does not depend on the file system."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (path for path in root.rglob("*.py") if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts))
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


@dataclass
class Corpus:
    """The bytes of two sets of files, each a one-dimensional uint8 tensor."""

    train: Tensor
    validation: Tensor
    files: int

    def description(self) -> str:
        train, validation = len(self.train), len(self.validation)
        return f"{self.files} files: {train:,} bytes for training, {validation:,} for validation"


def load_corpus() -> Corpus:
    """Reads the library; every tenth file is for validation."""
    texts = [FILE_START + path.read_bytes() for path in source_files()]
    if len(texts) < 10:
        folder = sysconfig.get_paths()["stdlib"]
        raise FileNotFoundError(f"{folder} has only {len(texts)} .py files: is the library zipped?")
    train = b"".join(text for index, text in enumerate(texts) if index % 10 != 9)
    return Corpus(as_tokens(train), as_tokens(b"".join(texts[9::10])), len(texts))


def as_tokens(text: bytes) -> Tensor:
    """One token per byte."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


Batch = tuple[Tensor, Tensor]  # inputs and targets, each (batch_size, context), int64


def random_windows(tokens: Tensor, batch_size: int, context: int, seed: int) -> Iterator[Batch]:
    """Endless batches at random places; the same seed gives the same batches."""
    if len(tokens) <= context:
        raise ValueError(f"context is {context}, but this part of the text has only {len(tokens)} bytes")
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - context, (batch_size, 1), generator=generator)
        windows = tokens[starts + torch.arange(context + 1)].long()
        yield windows[:, :-1], windows[:, 1:]
