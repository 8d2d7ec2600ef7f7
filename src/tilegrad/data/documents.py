"""Reads documents from files and folders. Files with other suffixes are refused, so that no model trains on binary data.

.txt .md …    the file is one document, unchanged; so is a file without a suffix, if its own path is given
.jsonl        each line is a document or a conversation; the text of a document is in one field
.gz           a compressed file of these kinds
a folder      all files with these suffixes in it and below it, in sorted order; its other files are counted as left out

EOS ends each document. If the tokenizer has no EOS, a blank line ends each document of a .jsonl, and nothing is added to
the text of a file.

Files are read in blocks or, if they are .jsonl, in lines: once to check and count the text, and again each time that it is
used. A line may take at most half of the memory of the machine. A .gz is decompressed in the same way, and refused if the
text exceeds both 16 MiB and 100 times the compressed size.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import resources
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ..memory.managed.pressure import memory_limit
from ..memory.page import human
from ..text.untrusted import naming, shown, shown_keys
from .conversations import detect_format

Numbers = dict[str, Any]  # the numbers of an event: {"step": 10, "loss": 2.5}
Show = Callable[[str, Numbers], None]  # called with each event ("prepare", "start", "train", …) and its numbers
TEXT = (".txt", ".text", ".md", ".rst", ".tex")
LINES = (".jsonl",)
_GZIP_GROWTH, _GZIP_SMALL = 100, 1 << 24  # the text of a .gz has at most 100 times its bytes, or 16 MiB if that is more
_BLOCK = 1 << 20  # bytes that are read at once
_FORMAT_LINES, _LONGEST = 20, 1 << 28  # lines of a .jsonl that are read to find its format; most bytes of such a line
_REMEDIES = {".json": "write each object into a line of its own, as .jsonl"}
_SURROGATE = re.compile("[\ud800-\udfff]")


Record: TypeAlias = dict[str, object]  # a line of .jsonl


class _Counted:
    """Counts and hashes the text that passes through it."""

    def __init__(self) -> None:
        self.sha256, self.bytes, self.characters = hashlib.sha256(), 0, 0

    def __call__(self, pieces: Iterable[str]) -> Iterator[str]:
        for piece in pieces:
            self.add(piece)
            yield piece

    def add(self, text: str) -> None:
        content = text.encode("utf-8")
        self.sha256.update(content)
        self.bytes += len(content)
        self.characters += len(text)

    def check(self, files: Sequence[Path], sha256: str) -> None:
        if self.sha256.hexdigest() != sha256:
            raise ValueError(
                f"{', '.join(map(str, files))}: got another text than at the first read; accepted: files that nothing "
                "changes while they are prepared"
            )


@dataclass(frozen=True, slots=True)
class Document:
    pieces: Iterator[str]  # the text, which must be used up before the next document
    blank_line: str  # its end if the tokenizer has no EOS: a blank line after a line of .jsonl, nothing after a file


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of files. Each iteration reads them again."""

    files: list[Path]
    left_out: int  # number of files of other kinds in the folders
    text_field: str
    lengths: list[int]  # characters of each document
    characters: int  # characters, bytes and sha256 of all documents, each with its blank line
    bytes: int
    sha256: str

    def __iter__(self) -> Iterator[Document]:
        counted = _Counted()
        for document in _documents(self.files, self.text_field, quiet):
            yield replace(document, pieces=counted(document.pieces))
            counted.add(document.blank_line)
        counted.check(self.files, self.sha256)

    def text(self) -> Iterator[str]:
        """All documents in pieces, each document with its blank line."""
        for document in self:
            yield from document.pieces
            yield document.blank_line


@dataclass(frozen=True, slots=True)
class Records:
    """Lines of .jsonl files. Each line is a conversation. Each iteration reads the files again."""

    files: list[Path]
    left_out: int
    count: int
    bytes: int  # bytes and sha256 of the text of all files
    sha256: str

    def __iter__(self) -> Iterator[tuple[str, Record]]:
        counted = _Counted()
        yield from _records(self.files, quiet, counted)
        counted.check(self.files, self.sha256)


def default_text() -> Path:
    """The path of the text that ships with this package: Moby-Dick, 1.2 MB, in the public domain."""
    return Path(str(resources.files("tilegrad.data").joinpath("text/moby-dick.txt")))


def quiet(_event: str, _numbers: Numbers) -> None:
    """A `Show` that shows nothing."""


def read_documents(paths: Sequence[Path], text_field: str = "text", show: Show = quiet) -> Documents:
    """The documents in files and folders, decoded as UTF-8 with unchanged line endings. `show` gets a progress event at most
    once a second."""
    files, left_out = find_files(paths)
    lengths: list[int] = []
    counted = _Counted()
    for document in _documents(files, text_field, show):
        lengths.append(sum(len(piece) for piece in counted(document.pieces)))
        counted.add(document.blank_line)
    if not counted.characters:
        raise ValueError(
            f"{', '.join(map(str, paths))}: got no text; accepted: files that contain text ({_accepted()})"
        )
    sha256 = counted.sha256.hexdigest()
    return Documents(files, left_out, text_field, lengths, counted.characters, counted.bytes, sha256)


def _documents(files: Sequence[Path], text_field: str, show: Show) -> Iterator[Document]:
    for file, text in _texts(files, show):
        if _suffix(file) in LINES:
            for number, record in _lines(file, text):
                yield Document(iter([_field(record, f"{file}, line {number}", text_field)]), "\n\n")
        else:
            yield Document(text, "")


def read_records(paths: Sequence[Path], show: Show = quiet) -> Records:
    """The lines of .jsonl in files and folders. `show` gets a progress event at most once a second."""
    files, left_out = find_files(paths)
    counted = _Counted()
    count = sum(1 for _ in _records(files, show, counted))
    if not count:
        raise ValueError(
            f"{', '.join(map(str, paths))}: got no line; accepted: .jsonl with a conversation in each line"
        )
    return Records(files, left_out, count, counted.bytes, counted.sha256.hexdigest())


def _records(files: Sequence[Path], show: Show, counted: _Counted) -> Iterator[tuple[str, Record]]:
    """(file and number of the line, the record) of each line."""
    for file, text in _texts(files, show):
        if _suffix(file) not in LINES:
            raise ValueError(
                f"{file}: got a text; accepted: .jsonl, because data.format says that lines are conversations"
            )
        for number, record in _lines(file, counted(text)):
            yield f"{file}, line {number}", record


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
    if _suffix(file) not in LINES:
        return "text"
    found: str | None = None
    for number, line in enumerate(_first_lines(file), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            break  # the error is raised when the whole file is read
        if not isinstance(record, dict):
            break  # this error too
        format = "text" if text_field in record else detect_format(record)
        if format is None:
            raise ValueError(
                f"{file}, line {number}: got the keys {shown_keys(record)}; accepted: an object with a string in "
                f"{text_field!r}, or with messages, with prompt and completion or response, or with instruction and output"
            )
        if found not in (None, format):
            raise ValueError(
                f"{file}, line {number}: got the format {format}; accepted: {found}, as in the lines before it"
            )
        found = format
    return found or "text"


def _first_lines(file: Path) -> Iterator[str]:
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
            yield line.decode("utf-8-sig" if number == 1 else "utf-8", errors="replace")


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


def _texts(files: Sequence[Path], show: Show) -> Iterator[tuple[Path, Iterator[str]]]:
    """Each file and its text: the lines of a .jsonl, blocks of other files."""
    last_shown = time.monotonic()
    for number, file in enumerate(files):
        if time.monotonic() - last_shown > 1:
            last_shown = time.monotonic()
            show("prepare", {"doing": f"reading: {number:,} of {len(files):,} files, now {file}"})
        yield file, _decoded(file, _content(file))


def find_files(paths: Sequence[Path]) -> tuple[list[Path], int]:
    """(files to read, number of other files in the folders)"""
    files, left_out = [], 0
    for path in paths:
        if path.is_dir():
            below = sorted(file for file in path.rglob("*") if file.is_file())
            readable = [file for file in below if _suffix(file) in TEXT + LINES]
            if not readable:
                raise ValueError(f"{path}: got a folder without text files; accepted: a folder with {_accepted()}")
            files += readable
            left_out += len(below) - len(readable)
        elif not path.is_file():
            raise FileNotFoundError(f"{path}: no such text file or folder")
        elif _suffix(path) not in ("", *TEXT, *LINES):
            raise ValueError(
                f"{path}: got a file of kind {''.join(path.suffixes[-2:])!r}; accepted: {_accepted()}; "
                f"{_REMEDIES.get(_suffix(path), 'give plain text the suffix .txt')}"
            )
        else:
            files.append(path)
    return files, left_out


def _accepted() -> str:
    return f"{', '.join(TEXT + LINES)}, one of these with .gz, or a file without a suffix"


def _suffix(file: Path) -> str:
    """The suffix of the file in lower case; if it is .gz, the suffix before .gz."""
    plain = file.with_suffix("") if file.suffix.lower() == ".gz" else file
    return plain.suffix.lower()


def _content(file: Path) -> Iterator[bytes]:
    """The bytes of the file, decompressed if it is a .gz: the lines of a .jsonl, blocks of other files."""
    grown, most, room = 0, sys.maxsize - 1, sys.maxsize - 1
    if file.suffix.lower() == ".gz":
        most = max(_GZIP_GROWTH * file.stat().st_size, _GZIP_SMALL)
    if lines := _suffix(file) in LINES:
        room = (memory_limit(torch.device("cpu")) or room) // 2
    with _opened(file) as opened:
        while part := opened.readline(min(room, most) + 1) if lines else opened.read(_BLOCK):
            grown += len(part)
            if grown > most:
                raise ValueError(
                    f"{file}: got {file.stat().st_size:,} bytes that decompress to more than {most >> 20} MiB; accepted: at "
                    f"most {_GZIP_GROWTH} times the compressed size; if the file is right, decompress it first"
                )
            if len(part) > room:
                raise ValueError(
                    f"{file}: got a line of more than {human(room)}, half of this machine's memory; accepted: shorter lines"
                )
            yield part


def _decoded(file: Path, content: Iterable[bytes]) -> Iterator[str]:
    decoder, read = codecs.getincrementaldecoder("utf-8-sig")(), 0  # drops a byte order mark at the beginning
    for part in chain(content, [b""]):  # the empty part ends the text
        try:
            text = decoder.decode(part, final=not part)
        except UnicodeDecodeError as error:
            begin = read + len(part) - len(error.object)  # a character may begin in the part before
            raise ValueError(
                f"{file}: is not UTF-8 at byte {begin + error.start}, 0x{error.object[error.start]:02x} ({error.reason}); "
                "convert the file, for instance with iconv -t utf-8"
            ) from error
        if "\0" in text:
            raise ValueError(
                f"{file}: got a zero byte at position {read + part.index(0)}; accepted: UTF-8 text, not binary data"
            )
        read += len(part)
        if text:
            yield text


def _lines(file: Path, lines: Iterable[str]) -> Iterator[tuple[int, Record]]:
    """The line number and the JSON object of each line that is not blank."""
    for number, line in enumerate(lines, 1):
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
    with naming(where):
        check_surrogates(text, repr(name))
    return text


def check_surrogates(text: str, name: str) -> None:
    if _SURROGATE.search(text):
        raise ValueError(f"got half of a surrogate pair in {name}; accepted: text that UTF-8 can encode")
