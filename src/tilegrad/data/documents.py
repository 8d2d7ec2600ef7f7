"""Files → text. The suffix gives a file's kind. Other kinds are refused, so no model learns from raw bytes by mistake.

.txt .md …    one document, unchanged; nothing separates it from the next
.jsonl        one document per line, its text in one field; a blank line follows each
.gz           either of these, compressed
a folder      all such files in it and below it, in sorted order; other files there are counted as left out

All of the text is in memory while it is encoded, so text larger than half of the machine's memory is refused before it is
read. A .gz is decompressed piece by piece, and refused if the text exceeds both 16 MiB and 100 times the
compressed size.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from ..memory.managed.pressure import memory_limit
from ..memory.page import human
from ..text.untrusted import shown

Numbers = dict[str, Any]  # the numbers of an event: {"step": 10, "loss": 2.5}
Show = Callable[[str, Numbers], None]  # called with each event ("prepare", "start", "train", …) and its numbers
TEXT = (".txt", ".text", ".md", ".rst", ".tex")
LINES = (".jsonl",)
_GZIP_GROWTH, _GZIP_SMALL = 100, 1 << 24  # text of a .gz: at most 100 times its size, or 16 MiB if that is more
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Documents:
    text: str
    files: int
    documents: int
    left_out: int  # files of other kinds in the folders


def default_text() -> Path:
    """The text that ships with the package: Moby-Dick, 1.2 MB, in the public domain."""
    return Path(str(resources.files("tilegrad.data").joinpath("text/moby-dick.txt")))


def quiet(_event: str, _numbers: Numbers) -> None:
    """A `Show` that shows nothing."""


def read_documents(paths: Sequence[Path], text_field: str = "text", show: Show = quiet) -> Documents:
    """The documents in files and folders, decoded as UTF-8, line endings unchanged. `show` gets the progress every second."""
    files, left_out = find_files(paths)
    memory = memory_limit(torch.device("cpu"))
    parts: list[str] = []
    room = math.inf if memory is None else memory / 2
    documents, last_shown = 0, time.monotonic()
    for number, file in enumerate(files):
        if time.monotonic() - last_shown > 1:
            last_shown = time.monotonic()
            show("prepare", {"doing": f"reading: {number:,} of {len(files):,} files, now {file}"})
        content = _content(file, room)
        room -= len(content)
        text = _decoded(file, content)
        if _kind(file) in LINES:
            found = list(_fields(file, text, text_field))
            parts += (f"{document}\n\n" for document in found)
            documents += len(found)
        else:
            parts.append(text)
            documents += 1
    if not any(parts):
        raise ValueError(
            f"{', '.join(map(str, paths))}: got no text; accepted: files that contain text ({_accepted()})"
        )
    return Documents("".join(parts), len(files), documents, left_out)


def find_files(paths: Sequence[Path]) -> tuple[list[Path], int]:
    """(files to read, number of other files in the folders)."""
    files, left_out = [], 0
    for path in paths:
        if path.is_dir():
            below = sorted(file for file in path.rglob("*") if file.is_file())
            understood = [file for file in below if _kind(file) in TEXT + LINES]
            if not understood:
                raise ValueError(f"{path}: got a folder without text files; accepted: a folder with {_accepted()}")
            files += understood
            left_out += len(below) - len(understood)
        elif not path.is_file():
            raise FileNotFoundError(f"{path}: no such text file or folder")
        elif _kind(path) not in ("", *TEXT, *LINES):
            raise ValueError(
                f"{path}: got a file of kind {''.join(path.suffixes[-2:])!r}; accepted: {_accepted()}; "
                "give plain text the suffix .txt"
            )
        else:
            files.append(path)
    return files, left_out


def _accepted() -> str:
    return f"{', '.join(TEXT + LINES)}, or one of these with .gz"


def _kind(file: Path) -> str:
    """The suffix that gives the file's kind, without .gz."""
    plain = file.with_suffix("") if file.suffix.lower() == ".gz" else file
    return plain.suffix.lower()


def _content(file: Path, room: float) -> bytes:
    """The file's bytes, decompressed; more than `room` bytes are refused."""
    size = file.stat().st_size
    if size > room:
        raise _too_large(file, size)
    if file.suffix.lower() != ".gz":
        return file.read_bytes()
    parts, grown, most = [], 0, max(_GZIP_GROWTH * size, _GZIP_SMALL)
    try:
        with gzip.open(file) as opened:
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
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{file}: is not gzip, or damaged: {error}") from error
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
            f"{file}: not UTF-8 at byte {error.start}, 0x{error.object[error.start]:02x} ({error.reason}); "
            "convert it, for instance with iconv -t utf-8"
        ) from error
    if "\0" in text:
        raise ValueError(
            f"{file}: got a zero byte at position {content.index(0)}; accepted: UTF-8 text, not binary data"
        )
    return text


def _fields(file: Path, text: str, name: str) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            record = json.loads(line)
        except RecursionError as error:
            raise ValueError(f"{where}: got values nested too deep; accepted: fewer levels") from error
        except ValueError as error:
            raise ValueError(f"{where}: is not JSON: {error}") from error
        if not isinstance(record, dict) or not isinstance(record.get(name), str):
            names = [*record][:20] if isinstance(record, dict) else None
            got = type(record).__name__ if names is None else f"the keys {', '.join(map(shown, names)) or 'none'}"
            raise ValueError(f"{where}: got {got}; accepted: an object with a string in {name!r} (data.text_field)")
        if _SURROGATE.search(record[name]):
            raise ValueError(f"{where}: got half of a surrogate pair in {name!r}; accepted: text that UTF-8 can encode")
        yield record[name]
