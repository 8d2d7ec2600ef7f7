"""documents.bin, next to tokens.bin: the ends of documents, and the tokens that are trained on.

    header     128 bytes: magic, version, counts, the two digests of tokens.bin, and a digest of `ends` and `trained`
    ends       int64 for each document: its tokens are tokens[ends[i − 1] : ends[i]]
    trained    one bit for each token, the lowest bit first; absent if every token is trained on

Without documents.bin the text is one sequence.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..text.atomic import write_whole
from .tokens import TokenFile, TokenFileError, Tokens

Mask = npt.NDArray[np.bool_]

_HEADER = struct.Struct("<8sIIQQ32s32s32s")  # magic, version, has bits, documents, tokens, three digests
_MAGIC, _VERSION = b"TGDOCMTS", 1


@dataclass(frozen=True, slots=True)
class DocumentFile:
    path: Path
    map: mmap.mmap
    ends: Tokens  # (documents,) int64, rising; the last end is the number of tokens
    bits: npt.NDArray[np.uint8] | None  # None: every token is trained on

    def trained(self, begin: int, end: int) -> Mask:
        """Whether each of tokens[begin:end] is trained on."""
        if self.bits is None:
            return np.ones(end - begin, np.bool_)
        found = np.unpackbits(self.bits[begin // 8 : (end + 7) // 8], bitorder="little")
        return found[begin % 8 : begin % 8 + end - begin].astype(np.bool_)


def write_documents(
    path: Path, ends: Tokens, trained: Mask | None, *, source_sha256: str, tokenizer_sha256: str
) -> None:
    """Write the file whole or not at all. The digests are the ones in the header of its tokens.bin."""
    parts = [
        ends.astype("<i8").tobytes(),
        b"" if trained is None else np.packbits(trained, bitorder="little").tobytes(),
    ]
    digest = hashlib.sha256(b"".join(parts)).digest()
    digests = bytes.fromhex(source_sha256), bytes.fromhex(tokenizer_sha256), digest
    count = int(ends[-1]) if len(ends) else 0
    header = _HEADER.pack(_MAGIC, _VERSION, trained is not None, len(ends), count, *digests)
    write_whole(path, [header, *parts])


def open_documents(path: Path, file: TokenFile) -> DocumentFile:
    """Map documents.bin and check its header, size, digests and ends. Raises TokenFileError if it does not belong to `file`."""
    with path.open("rb") as opened:
        head = opened.read(_HEADER.size)
    if not head.startswith(_MAGIC) or len(head) < _HEADER.size:
        raise TokenFileError(f"{path}: begins with {head[:8]!r}, or ends in its header: not a file of documents")
    _, version, has_bits, documents, count, source, tokenizer, digest = _HEADER.unpack(head)
    if version != _VERSION:
        raise TokenFileError(f"{path}: got version {version}; accepted: version {_VERSION}")
    if (source.hex(), tokenizer.hex(), count) != (file.source_sha256, file.tokenizer_sha256, len(file.tokens)):
        raise TokenFileError(f"{path}: belongs to other tokens than {file.path}")
    expected = _HEADER.size + 8 * documents + ((count + 7) // 8 if has_bits else 0)
    found = path.stat().st_size
    if has_bits > 1 or not documents or found != expected:
        raise TokenFileError(f"{path}: got {found} bytes, but {documents} documents of {count} tokens need {expected}")
    with path.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), expected, access=mmap.ACCESS_READ)
    if hashlib.sha256(memoryview(mapped)[_HEADER.size :]).digest() != digest:
        raise TokenFileError(f"{path}: damaged: it does not have the digest that is in its header")
    ends = np.frombuffer(mapped, "<i8", documents, _HEADER.size)
    if int(ends[0]) < 1 or int(ends[-1]) != count or (np.diff(ends) < 1).any():
        raise TokenFileError(f"{path}: got ends of documents that do not rise from 1 to {count}")
    bits = np.frombuffer(mapped, np.uint8, offset=_HEADER.size + 8 * documents) if has_bits else None
    return DocumentFile(path, mapped, ends, bits)
