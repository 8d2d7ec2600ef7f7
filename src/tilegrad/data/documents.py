"""Reads documents from files and folders. Files with other suffixes are refused, so that no model trains on binary data.

.txt .md …    the file is one document, unchanged; so is a file without a suffix that is given by its own path
.jsonl        each line is a document or a conversation; the text of a document is in one field
.gz           a compressed file of these kinds
a folder      all files with these suffixes in it and below it, in sorted order; its other files are counted as left out

EOS ends each document. If the tokenizer has no EOS, a blank line ends each document of a .jsonl, and nothing is added to
the text of a file.

All of the text is in memory while it is encoded, so a file is refused if the text would exceed half of the memory of the
machine. A .gz is decompressed in chunks, and refused if the text exceeds both 16 MiB and 100 times the compressed size.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import re
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ..memory.managed.pressure import memory_limit
from ..memory.page import human
from ..text.untrusted import shown, shown_keys
from .conversations import detect_format

Numbers = dict[str, Any]  # the numbers of an event: {"step": 10, "loss": 2.5}
Show = Callable[[str, Numbers], None]  # called with each event ("prepare", "start", "train", …) and its numbers
TEXT = (".txt", ".text", ".md", ".rst", ".tex")
LINES = (".jsonl",)
_GZIP_GROWTH, _GZIP_SMALL = 100, 1 << 24  # the text of a .gz has at most 100 times its bytes, or 16 MiB if that is more
_FORMAT_LINES, _LONGEST = 20, 1 << 28  # lines of a .jsonl that are read to find its format; the most bytes of a line
_REMEDIES = {".json": "write each object into a line of its own, as .jsonl"}
_SURROGATE = re.compile("[\ud800-\udfff]")


Record: TypeAlias = dict[str, object]  # a line of .jsonl


@dataclass(frozen=True, slots=True)
class Documents:
    texts: list[str]
    blank_lines: list[str]  # the end of each text if the tokenizer has no EOS: a blank line, or nothing
    places: list[tuple[Path, int]]  # the file and the line of each text; line 0 is the whole file
    files: int
    left_out: int  # number of files of other kinds in the folders

    @property
    def text(self) -> str:
        """All documents in one string, each with its blank line."""
        return "".join(f"{text}{blank}" for text, blank in zip(self.texts, self.blank_lines, strict=True))

    @property
    def documents(self) -> int:
        return len(self.texts)


@dataclass(frozen=True, slots=True)
class Records:
    """Lines of .jsonl files. Each line is a conversation."""

    records: list[Record]
    places: list[tuple[Path, int]]
    sha256: str  # sha256 of the text of all files
    bytes: int
    files: int
    left_out: int


def default_text() -> Path:
    """The path of the text that ships with this package: Moby-Dick, 1.2 MB, in the public domain."""
    return Path(str(resources.files("tilegrad.data").joinpath("text/moby-dick.txt")))


def quiet(_event: str, _numbers: Numbers) -> None:
    """A `Show` that shows nothing."""


def read_documents(paths: Sequence[Path], text_field: str = "text", show: Show = quiet) -> Documents:
    """The documents in files and folders, decoded as UTF-8 with unchanged line endings. `show` gets a progress event at most
    once a second."""
    files, left_out = find_files(paths)
    texts: list[str] = []
    blank_lines: list[str] = []
    places: list[tuple[Path, int]] = []
    for file, text in _contents(files, show):
        if _kind(file) in LINES:
            found = [
                (number, _field(record, f"{file}, line {number}", text_field)) for number, record in _lines(file, text)
            ]
            texts += (document for _, document in found)
            blank_lines += ["\n\n"] * len(found)
            places += ((file, number) for number, _ in found)
        else:
            texts.append(text)
            blank_lines.append("")
            places.append((file, 0))
    if not any((*texts, *blank_lines)):
        raise ValueError(
            f"{', '.join(map(str, paths))}: got no text; accepted: files that contain text ({_accepted()})"
        )
    return Documents(texts, blank_lines, places, len(files), left_out)


def read_records(paths: Sequence[Path], show: Show = quiet) -> Records:
    """The lines of .jsonl in files and folders. `show` gets a progress event at most once a second."""
    files, left_out = find_files(paths)
    records: list[Record] = []
    places: list[tuple[Path, int]] = []
    digest, size = hashlib.sha256(), 0
    for file, text in _contents(files, show):
        if _kind(file) not in LINES:
            raise ValueError(
                f"{file}: got a text; accepted: .jsonl, because data.format says that lines are conversations"
            )
        content = text.encode("utf-8")
        digest.update(content)
        size += len(content)
        for number, record in _lines(file, text):
            records.append(record)
            places.append((file, number))
    if not records:
        raise ValueError(
            f"{', '.join(map(str, paths))}: got no line; accepted: .jsonl with a conversation in each line"
        )
    return Records(records, places, digest.hexdigest(), size, len(files), left_out)


def find_format(paths: Sequence[Path], text_field: str) -> str:
    """The format of these files, from the first lines of each .jsonl; "text" if the files have no conversations."""
    kinds: dict[str, Path] = {}
    for file in find_files(paths)[0]:
        kinds.setdefault(_format_of(file, text_field), file)
    if len(kinds) > 1:
        (one, first), (other, second), *_ = kinds.items()
        raise ValueError(
            f"files: got {first} ({one}) and {second} ({other}); accepted: files of one format; "
            "train on each format in its own run"
        )
    return next(iter(kinds), "text")


def _format_of(file: Path, text_field: str) -> str:
    if _kind(file) not in LINES:
        return "text"
    found = "text"
    for number, line in enumerate(_head(file), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return found  # the error is raised when the whole file is read
        if not isinstance(record, dict) or text_field in record:
            return "text"
        format = detect_format(record)
        if format is None:
            raise ValueError(
                f"{file}, line {number}: got the keys {shown_keys(record)}; accepted: an object with a string in "
                f"{text_field!r}, or with messages, with prompt and completion or response, or with instruction and output"
            )
        if found not in ("text", format):
            raise ValueError(
                f"{file}, line {number}: got the format {format}; accepted: {found}, as in the lines before it"
            )
        found = format
    return found


def _head(file: Path) -> Iterator[str]:
    """Yields the first lines of a .jsonl."""
    with _opened(file) as opened:
        for number in range(1, _FORMAT_LINES + 1):
            line = opened.readline(_LONGEST)
            if not line:
                return
            if len(line) == _LONGEST and not line.endswith(b"\n"):
                raise ValueError(
                    f"{file}, line {number}: got a line of more than {human(_LONGEST)}; accepted: shorter lines, or "
                    "data.format text, messages, prompt or instruction"
                )
            yield line.decode("utf-8", errors="replace")


@contextmanager
def _opened(file: Path) -> Iterator[gzip.GzipFile | BufferedReader]:
    """The open file, decompressed if it is a .gz. Errors name the file."""
    try:
        with gzip.open(file) if file.suffix.lower() == ".gz" else file.open("rb") as opened:
            yield opened
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{file}: is not gzip, or is damaged: {error}") from error
    except OSError as error:
        raise ValueError(f"{file}: can't be read: {error.strerror or error}") from error


def _contents(files: Sequence[Path], show: Show) -> Iterator[tuple[Path, str]]:
    memory = memory_limit(torch.device("cpu"))
    room = math.inf if memory is None else memory / 2
    last_shown = time.monotonic()
    for number, file in enumerate(files):
        if time.monotonic() - last_shown > 1:
            last_shown = time.monotonic()
            show("prepare", {"doing": f"reading: {number:,} of {len(files):,} files, now {file}"})
        content = _content(file, room)
        room -= len(content)
        yield file, _decoded(file, content)


def find_files(paths: Sequence[Path]) -> tuple[list[Path], int]:
    """(files to read, number of other files in the folders)"""
    files, left_out = [], 0
    for path in paths:
        if path.is_dir():
            below = sorted(file for file in path.rglob("*") if file.is_file())
            readable = [file for file in below if _kind(file) in TEXT + LINES]
            if not readable:
                raise ValueError(f"{path}: got a folder without text files; accepted: a folder with {_accepted()}")
            files += readable
            left_out += len(below) - len(readable)
        elif not path.is_file():
            raise FileNotFoundError(f"{path}: no such text file or folder")
        elif _kind(path) not in ("", *TEXT, *LINES):
            raise ValueError(
                f"{path}: got a file of kind {''.join(path.suffixes[-2:])!r}; accepted: {_accepted()}; "
                f"{_REMEDIES.get(_kind(path), 'give plain text the suffix .txt')}"
            )
        else:
            files.append(path)
    return files, left_out


def _accepted() -> str:
    return f"{', '.join(TEXT + LINES)}, one of these with .gz, or a file without a suffix"


def _kind(file: Path) -> str:
    """The suffix of the file in lower case; if it is .gz, the suffix before .gz."""
    plain = file.with_suffix("") if file.suffix.lower() == ".gz" else file
    return plain.suffix.lower()


def _content(file: Path, room: float) -> bytes:
    """The bytes of the file, decompressed if it is a .gz. More than `room` bytes are refused."""
    size = file.stat().st_size
    if size > room:
        raise _too_large(file, size)
    parts, grown, most = [], 0, max(_GZIP_GROWTH * size, _GZIP_SMALL)
    with _opened(file) as opened:
        if file.suffix.lower() != ".gz":
            return opened.read()
        while part := opened.read(1 << 20):
            grown += len(part)
            if grown > most:
                raise ValueError(
                    f"{file}: got {size:,} bytes that decompress to more than {grown >> 20} MiB; accepted: at most "
                    f"{_GZIP_GROWTH} times the compressed size; if the file is right, decompress it first"
                )
            if grown > room:
                raise _too_large(file, grown)
            parts.append(part)
    return b"".join(parts)


def _too_large(file: Path, size: int) -> ValueError:
    return ValueError(
        f"{file}: got {human(size)} of text, which with the files before it is more than half of this machine's memory; "
        "accepted: less, because all of the text is in memory while it is encoded"
    )


def _decoded(file: Path, content: bytes) -> str:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file}: is not UTF-8 at byte {error.start}, 0x{error.object[error.start]:02x} ({error.reason}); "
            "convert the file, for instance with iconv -t utf-8"
        ) from error
    if "\0" in text:
        raise ValueError(
            f"{file}: got a zero byte at position {content.index(0)}; accepted: UTF-8 text, not binary data"
        )
    return text


def _lines(file: Path, text: str) -> Iterator[tuple[int, Record]]:
    """The line number and the JSON object of each line that is not blank."""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            record = json.loads(line)
        except RecursionError as error:
            raise ValueError(f"{where}: got values nested too deeply; accepted: fewer levels") from error
        except ValueError as error:
            raise ValueError(f"{where}: is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{where}: got {type(record).__name__}; accepted: an object")
        yield number, record


def _field(record: Record, where: str, name: str) -> str:
    text = record.get(name)
    if not isinstance(text, str):
        got = f"{shown(text)} in {name!r}" if name in record else f"the keys {shown_keys(record)}"
        raise ValueError(f"{where}: got {got}; accepted: an object with a string in {name!r} (data.text_field)")
    try:
        check_surrogates(text, repr(name))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return text


def check_surrogates(text: str, name: str) -> None:
    if _SURROGATE.search(text):
        raise ValueError(f"got half of a surrogate pair in {name}; accepted: text that UTF-8 can encode")
