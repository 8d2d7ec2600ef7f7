"""A token file: a header of 96 bytes, then the tokens in little-endian order, as uint16 if the vocabulary has at most 65536
tokens, otherwise as uint32."""

from __future__ import annotations

import errno
import hashlib
import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from ..text.atomic import whole_file

if TYPE_CHECKING:
    from .document_file import DocumentFile

Tokens: TypeAlias = npt.NDArray[np.integer]  # the tokens of a file are uint16 or uint32, memory-mapped

_HEADER = struct.Struct("<8sIIQQ32s32s")  # magic, version, bytes per token, tokens, vocab size, two digests
_MAGIC, _VERSION = b"TGTOKENS", 1
_CHUNK = 1 << 22  # tokens that are written, checked or counted at once


class TokenFileError(ValueError):
    """A token file that is damaged, has another version, or has a token outside its vocabulary."""


@dataclass(frozen=True, slots=True)
class TokenFile:
    path: Path
    map: mmap.mmap
    tokens: Tokens  # a read-only view of `map`
    vocab_size: int
    source_sha256: str  # sha256 of the text, as UTF-8
    tokenizer_sha256: str  # sha256 of `Tokenizer.json()`
    documents: DocumentFile | None = None  # None: the tokens are one sequence

    def check_length(self) -> None:
        """Raise OSError if a mapped file has become shorter: reading beyond its end would kill the process (SIGBUS)."""
        for file in (self, self.documents):
            if file is not None and file.map.size() < len(file.map):
                size, mapped = file.map.size(), len(file.map)
                raise OSError(
                    errno.EIO, f"truncated while it was in use: {size} bytes, {mapped} before", str(file.path)
                )


def write_tokens(
    path: Path, parts: Iterable[Tokens], *, vocab_size: int, source_sha256: str, tokenizer_sha256: str
) -> None:
    """Write the whole file or none: it gets its name when all `parts` are written. Raises if a token is out of range."""
    dtype, count = token_dtype(vocab_size), 0
    with whole_file(path) as staged, staged.open("wb") as file:
        file.write(bytes(_HEADER.size))
        for tokens in parts:
            check_range(tokens, vocab_size, "tokens", first=count)
            for begin in range(0, len(tokens), _CHUNK):
                file.write(tokens[begin : begin + _CHUNK].astype(dtype, copy=False).tobytes())
            count += len(tokens)
        digests = bytes.fromhex(source_sha256), bytes.fromhex(tokenizer_sha256)
        file.seek(0)
        file.write(_HEADER.pack(_MAGIC, _VERSION, dtype.itemsize, count, vocab_size, *digests))


def open_tokens(path: Path) -> TokenFile:
    """Map the file, and check its header, its size, and the range of every token in one pass."""
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
    remedy = "write it again from its text"
    if not head.startswith(_MAGIC):
        raise TokenFileError(f"{path}: begins with {head[:8]!r}, not {_MAGIC!r}: not a token file")
    if len(head) < _HEADER.size:
        raise TokenFileError(f"{path}: {len(head)} bytes are less than a header; {remedy}")
    _, version, itemsize, count, vocab_size, source, tokenizer = _HEADER.unpack(head)
    if version != _VERSION:
        raise TokenFileError(f"{path}: got version {version}; accepted: version {_VERSION}; {remedy}")
    if not 1 <= vocab_size <= 1 << 32:
        raise TokenFileError(f"{path}: got a vocabulary of {vocab_size}; accepted: 1 … 2³²; {remedy}")
    if itemsize != token_dtype(vocab_size).itemsize:
        raise TokenFileError(f"{path}: {itemsize} bytes per token do not match a vocabulary of {vocab_size}; {remedy}")
    expected, size = _HEADER.size + count * itemsize, path.stat().st_size
    if size != expected:
        what = "truncated" if size < expected else "too long"
        raise TokenFileError(f"{path}: {what}: got {size} bytes, but {count} tokens need {expected}; {remedy}")
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), expected, access=mmap.ACCESS_READ)
    tokens = np.frombuffer(mapped, token_dtype(vocab_size), offset=_HEADER.size)
    check_range(tokens, vocab_size, str(path))
    return TokenFile(path, mapped, tokens, vocab_size, source.hex(), tokenizer.hex())


def token_dtype(vocab_size: int) -> np.dtype[np.integer]:
    if not 1 <= vocab_size <= 1 << 32:
        raise ValueError(f"vocab_size: got {vocab_size}; accepted: 1 … 2³²")
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def check_range(tokens: Tokens, vocab_size: int, name: str, *, first: int = 0) -> None:
    """Raise if a token is not in 0 … vocab_size − 1. first: the position of the first of these tokens, for the error."""
    for begin in range(0, len(tokens), _CHUNK):
        chunk = tokens[begin : begin + _CHUNK]
        if int(chunk.max()) >= vocab_size or int(chunk.min()) < 0:
            at = int(np.argmax((chunk >= vocab_size) | (chunk < 0)))
            raise TokenFileError(
                f"{name}: token {int(chunk[at])} at position {first + begin + at} is not in the vocabulary of {vocab_size} "
                "tokens"
            )


def tokens_sha256(tokens: Tokens) -> str:
    return hashlib.sha256(np.ascontiguousarray(tokens).data).hexdigest()


def unigram_entropy(tokens: Tokens) -> float:
    """−Σ p ln p, in nats: the lowest loss of a model that knows only the frequencies of tokens."""
    if not len(tokens):
        raise ValueError("tokens: got none; accepted: at least one token")
    counts: Tokens = np.zeros(1, np.int64)
    for begin in range(0, len(tokens), _CHUNK):
        new_counts = np.bincount(tokens[begin : begin + _CHUNK], minlength=len(counts))
        new_counts[: len(counts)] += counts
        counts = new_counts
    p = counts[counts > 0] / len(tokens)
    return float(-(p * np.log(p)).sum())
