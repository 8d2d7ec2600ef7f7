"""Reads a GGUF file from an untrusted source.

    "GGUF"  version u32  tensors u64  values u64
    values:   key, type u32, value      a string is its length u64 and UTF-8; an array is type u32, count u64, items
    tensors:  name, n u32, n dimensions u64 (in the reverse of torch's order), type u32, offset u64
    data, from the next multiple of general.alignment

Counts, lengths and offsets are compared with the size of the file before anything is allocated for them. Metadata and the
table of tensors have at most MAX_HEADER_BYTES. Every error is a ValueError with the name of the file.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from ...text.untrusted import regular_file, shown

MAX_HEADER_BYTES = 1 << 26  # four times the header of a model with 262,144 tokens
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # type → struct
_STRING, _ARRAY = 8, 9

Scalar = bool | int | float | str
Value = Scalar | list[Scalar]


def library() -> ModuleType:
    """The package `gguf`."""
    try:
        import gguf
    except ImportError as error:
        raise ImportError("gguf: is not installed; accepted: a GGUF file after pip install 'tilegrad[gguf]'") from error
    module: ModuleType = gguf
    return module


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in the table: its shape in torch's order, the number of its ggml type, and the place of its bytes."""

    shape: tuple[int, ...]
    kind: int
    start: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Container:
    """A GGUF file. Its metadata and table have been read and checked, its tensors have not been read."""

    path: Path
    values: Mapping[str, Value]
    tensors: Mapping[str, Entry]

    def tensor(self, name: str) -> Tensor:
        """The tensor in float32, dequantized by `gguf`."""
        entry = self.tensors[name]
        raw = np.fromfile(self.path, np.uint8, entry.n_bytes, offset=entry.start)
        if raw.size != entry.n_bytes:
            raise ValueError(f"{self.path}: {shown(name)}: got {raw.size:,} bytes; accepted: {entry.n_bytes:,}")
        rows = raw.reshape(*entry.shape[:-1], -1)
        gguf = library()
        with np.errstate(all="ignore"):  # a NaN in the file stays a NaN
            values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(entry.kind))
        return torch.from_numpy(np.ascontiguousarray(values, np.float32)).reshape(entry.shape)


class _Header:
    """The first bytes of a file, read from left to right."""

    def __init__(self, path: Path) -> None:
        self.path, self.at = path, 0
        self.size = regular_file(path).stat().st_size
        with path.open("rb") as file:
            self.bytes = file.read(min(self.size, MAX_HEADER_BYTES))

    def refuse(self, got: str, accepted: str) -> ValueError:
        return ValueError(f"{self.path}: is not a GGUF file, or is damaged: {got}; accepted: {accepted}")

    def take(self, n: int, what: str) -> bytes:
        if n > len(self.bytes) - self.at:
            if len(self.bytes) == self.size:
                raise self.refuse(f"got the end of the file at byte {self.size:,}, in {what}", "a whole file")
            raise self.refuse(f"got more than {MAX_HEADER_BYTES:,} bytes before the data, in {what}", "fewer")
        self.at += n
        return self.bytes[self.at - n : self.at]

    def scalar(self, code: str, what: str) -> int | float | bool:
        value: int | float | bool = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]
        return value

    def count(self, code: str, what: str) -> int:
        return int(self.scalar(code, what))

    def string(self, what: str) -> str:
        raw = self.take(self.count("Q", what), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.refuse(f"got {what} that is not UTF-8 ({error.reason})", "UTF-8") from error

    def value(self, what: str) -> Value:
        kind = self.count("I", what)
        if kind != _ARRAY:
            return self.one(kind, what)
        kind, count = self.count("I", what), self.count("Q", what)
        if kind == _STRING:
            if 8 * count > len(self.bytes) - self.at:  # an empty string takes 8 bytes
                raise self.refuse(f"got {count:,} strings in {what}", "as many as the file has room for")
            return [self.string(what) for _ in range(count)]
        code = self.code(kind, what)
        raw = self.take(count * struct.calcsize(f"<{code}"), what)
        return list(struct.unpack(f"<{count}{code}", raw))

    def one(self, kind: int, what: str) -> Scalar:
        return self.string(what) if kind == _STRING else self.scalar(self.code(kind, what), what)

    def code(self, kind: int, what: str) -> str:
        if kind not in _SCALARS:
            raise self.refuse(f"got type {kind} of {what}", "0 … 12, and no array in an array")
        return _SCALARS[kind]


def open_container(path: Path) -> Container:
    """Read and check metadata and the table of tensors."""
    header = _Header(path)
    if (magic := header.take(4, "the first bytes")) != b"GGUF":
        raise header.refuse(f"got {magic!r} at its start", "b'GGUF'")
    if (version := header.count("I", "the version")) not in _VERSIONS:
        got = f"got version {version}" + (", of a big-endian file" if version >= 1 << 16 else "")
        raise header.refuse(got, " or ".join(map(str, _VERSIONS)))
    n_tensors, n_values = (header.count("Q", "the counts") for _ in range(2))
    values: dict[str, Value] = {}
    for _ in range(n_values):  # each value takes bytes, so too large a count raises at the end of the file
        key = header.string("the name of a value")
        if key in values:
            raise header.refuse(f"got {shown(key)} twice", "each value once")
        values[key] = header.value(shown(key))
    if values.get("split.count", 0) not in (0, 1):
        raise ValueError(
            f"{path}: got part {shown(values.get('split.no'))} of {shown(values['split.count'])} of a model, numbered from 0; "
            "accepted: one file: llama-gguf-split --merge FIRST-PART.gguf WHOLE.gguf joins them"
        )
    table = _table(header, n_tensors)
    return Container(path, values, _entries(header, table, _alignment(header, values)))


def _alignment(header: _Header, values: Mapping[str, Value]) -> int:
    align = values.get("general.alignment", 32)
    if type(align) is not int or not 1 <= align <= _MAX_ALIGNMENT or align & align - 1:
        raise header.refuse(f"got general.alignment {shown(align)}", f"a power of two, at most {_MAX_ALIGNMENT:,}")
    return align


def _table(header: _Header, count: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
    """name → (shape in torch's order, type, offset)"""
    table: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(count):
        name = header.string("the name of a tensor")
        what = shown(name)
        if name in table:
            raise header.refuse(f"got the tensor {what} twice", "each tensor once")
        n = header.count("I", what)
        if not 1 <= n <= _MAX_DIMENSIONS:
            raise header.refuse(f"got {n} dimensions of {what}", f"1 … {_MAX_DIMENSIONS}")
        shape = tuple(header.count("Q", what) for _ in range(n))[::-1]
        table[name] = shape, header.count("I", what), header.count("Q", what)
    return table


def _entries(header: _Header, table: Mapping[str, tuple[tuple[int, ...], int, int]], align: int) -> dict[str, Entry]:
    """The place of each tensor, which must have whole blocks, be aligned and inside the file, and overlap no other tensor."""
    gguf = library()
    start = -(-header.at // align) * align
    sizes: dict[int, tuple[int, int] | None] = {}
    out: dict[str, Entry] = {}
    for name, (shape, kind, offset) in table.items():
        what = shown(name)
        if kind not in sizes:
            sizes[kind] = _block(gguf, kind)
        size = sizes[kind]
        if size is None:
            raise header.refuse(f"got {what} of type {_type_name(gguf, kind)}", "types that gguf dequantizes")
        count, n_bytes = size
        elements = math.prod(shape)
        if elements < 1 or shape[-1] % count:
            raise header.refuse(f"got {what} of shape {shown(shape)}", f"rows of whole blocks of {count}, none empty")
        entry = Entry(shape, kind, start + offset, elements // count * n_bytes)
        if offset % align or entry.start + entry.n_bytes > header.size:
            place = f"bytes {entry.start:,} … {entry.start + entry.n_bytes:,}"
            raise header.refuse(f"got {what} at {place}", f"multiples of {align}, up to {header.size:,}")
        out[name] = entry
    last, end = "", 0
    for name, entry in sorted(out.items(), key=lambda item: item[1].start):
        if entry.start < end:
            raise header.refuse(f"got {shown(name)}, which overlaps {shown(last)}", "no overlap")
        last, end = name, entry.start + entry.n_bytes
    return out


def _block(gguf: ModuleType, kind: int) -> tuple[int, int] | None:
    """(elements, bytes) of a block; None for a type that `gguf` does not dequantize."""
    try:
        ggml_type = gguf.GGMLQuantizationType(kind)
        count, n_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
        with np.errstate(all="ignore"):
            gguf.quants.dequantize(np.zeros((1, n_bytes), np.uint8), ggml_type)
    except (ValueError, KeyError, NotImplementedError):
        return None
    return int(count), int(n_bytes)


def _type_name(gguf: ModuleType, kind: int) -> str:
    try:
        return str(gguf.GGMLQuantizationType(kind).name)
    except ValueError:
        return str(kind)
