"""Documents of different lengths without a download, packed into sequences of one length.

The documents are the functions and classes of Python's standard library, and the documentation of installed packages.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distributions
from itertools import islice

import torch
from stdlib_text import FILE_START, Tokenizer, source_files
from torch import Tensor
from torch.nn.functional import pad

DEFINITION = re.compile(rb"\n(?=(?:async def|def|class|@)\b)")  # a new document begins at each match
PAGES = (".md", ".rst")


@dataclass(frozen=True)
class Pack:
    """Documents that follow each other in one sequence of T tokens, and the next token of each token."""

    inputs: Tensor  # (T), int64
    targets: Tensor  # (T), int64
    cu_seqlens: Tensor  # (documents + 1), int32: document i has the tokens cu_seqlens[i]:cu_seqlens[i + 1]


@dataclass
class Documents:
    """The tokens of all documents, one after the other, for training and for validation."""

    train: Tensor  # (tokens), int16
    train_lengths: Tensor  # (documents), int64
    validation: Tensor
    validation_lengths: Tensor

    def description(self) -> str:
        return (
            f"{len(self.train_lengths):,} documents for training, {len(self.train):,} tokens; "
            f"{len(self.validation_lengths):,} for validation, {len(self.validation):,} tokens; "
            f"median length {self.train_lengths.median().item()} tokens"
        )


def read_texts() -> list[bytes]:
    """Reads the texts of all documents."""
    sources = (DEFINITION.split(path.read_bytes()) for path in source_files())
    return [text for texts in sources for text in texts] + list(_package_pages())


def _package_pages() -> Iterator[bytes]:
    """Yields the description and the pages of each installed package, in an order that depends on the names only."""
    for package in sorted(distributions(), key=lambda package: (package.name or "").lower()):
        yield (package.metadata["Description"] or str(package.metadata.get_payload() or "")).encode()
        for file in sorted(package.files or (), key=str):
            if file.suffix.lower() in PAGES and file.locate().is_file():
                yield file.read_binary()


def as_documents(texts: list[bytes]) -> Documents:
    """Converts texts to tokens. Every tenth text is for validation. The tokenizer is made from the other texts only."""
    texts = [FILE_START + text for text in texts if text.strip()]
    validation = texts[9::10]
    train = [text for index, text in enumerate(texts) if index % 10 != 9]
    tokenizer = Tokenizer(b"".join(train))
    return Documents(*_tokens(tokenizer, train), *_tokens(tokenizer, validation))


def _tokens(tokenizer: Tokenizer, texts: list[bytes]) -> tuple[Tensor, Tensor]:
    encoded = [tokenizer.encode(text) for text in texts]
    encoded = [tokens for tokens in encoded if len(tokens) > 1]  # one token has no next token
    return torch.cat(encoded), torch.tensor([len(tokens) for tokens in encoded])


def packs(tokens: Tensor, lengths: Tensor, context: int, seed: int) -> Iterator[Pack]:
    """Yields endless packs of `context` tokens, of documents in random order. The same seed gives the same packs.

    A pack's last document is cut at the end of the pack. The rest of it is the first document of the next pack.
    """
    ends = lengths.cumsum(0)
    generator = torch.Generator().manual_seed(seed)
    inputs, targets, document_lengths, free = [], [], [], context
    while True:
        for document in torch.randperm(len(lengths), generator=generator).tolist():
            begin, last = int(ends[document] - lengths[document]), int(ends[document]) - 1  # `last` is a target only
            while begin < last:
                end = min(begin + free, last)
                inputs.append(tokens[begin:end])
                targets.append(tokens[begin + 1 : end + 1])
                document_lengths.append(end - begin)
                free -= end - begin
                begin = end
                if free == 0:
                    cu_seqlens = pad(torch.tensor(document_lengths).cumsum(0), (1, 0)).int()
                    yield Pack(torch.cat(inputs).long(), torch.cat(targets).long(), cu_seqlens)
                    inputs, targets, document_lengths, free = [], [], [], context


def validation_packs(documents: Documents, context: int, count: int) -> list[Pack]:
    return list(islice(packs(documents.validation, documents.validation_lengths, context, seed=0), count))
