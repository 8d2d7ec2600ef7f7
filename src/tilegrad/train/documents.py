"""Files → text. What a file is, its name says; what is not understood is refused, never learned from as raw bytes.

.txt .md …    one document, as it is; one follows the other with nothing between
.jsonl        a document for each line, the text in one field of it; a blank line follows each
.gz           either of these, compressed
a folder      all of these in it and below it, in sorted order; other files there are counted as left out
"""

from __future__ import annotations

import gzip
import json
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Tell = Callable[[str, dict[str, Any]], None]  # an event and its numbers
TEXT = (".txt", ".text", ".md", ".rst", ".tex")
LINES = (".jsonl",)


@dataclass(frozen=True, slots=True)
class Documents:
    text: str
    files: int
    documents: int
    left_out: int  # files in folders that are of other kinds


def quiet(event: str, numbers: dict[str, Any]) -> None:
    pass


def read_documents(paths: Sequence[Path], text_field: str = "text", tell: Tell = quiet) -> Documents:
    """The documents of files and folders, as UTF-8, no line ending changed. Told about each second: the files behind."""
    files, left_out = find_files(paths)
    parts: list[str] = []
    documents, told = 0, time.monotonic()
    for number, file in enumerate(files):
        if time.monotonic() - told > 1:
            told = time.monotonic()
            tell("prepare", {"doing": f"reading: {number:,} of {len(files):,} files, now {file}"})
        text = _decoded(file)
        if _kind(file) in LINES:
            found = list(_fields(file, text, text_field))
            parts += (f"{document}\n\n" for document in found)
            documents += len(found)
        else:
            parts.append(text)
            documents += 1
    if not any(parts):
        raise ValueError(f"{', '.join(map(str, paths))}: got no text; accepted: {_accepted()} with text in it")
    return Documents("".join(parts), len(files), documents, left_out)


def find_files(paths: Sequence[Path]) -> tuple[list[Path], int]:
    """(files to read, how many others the folders hold)."""
    files, left_out = [], 0
    for path in paths:
        if path.is_dir():
            below = sorted(file for file in path.rglob("*") if file.is_file())
            understood = [file for file in below if _kind(file) in TEXT + LINES]
            if not understood:
                raise ValueError(
                    f"{path}: got a folder without text; accepted: one with {_accepted()} in it or below it"
                )
            files += understood
            left_out += len(below) - len(understood)
        elif not path.is_file():
            raise FileNotFoundError(f"{path}: no such text file or folder")
        elif _kind(path) not in ("", *TEXT, *LINES):
            raise ValueError(
                f"{path}: got a file of kind {''.join(path.suffixes[-2:])!r}; accepted: {_accepted()}; "
                "plain text of another name goes by .txt"
            )
        else:
            files.append(path)
    return files, left_out


def _accepted() -> str:
    return f"{', '.join(TEXT + LINES)}, each also with .gz"


def _kind(file: Path) -> str:
    """The suffix that says what is inside, below .gz."""
    plain = file.with_suffix("") if file.suffix.lower() == ".gz" else file
    return plain.suffix.lower()


def _decoded(file: Path) -> str:
    content = file.read_bytes()
    if file.suffix.lower() == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{file}: is not gzip, or damaged: {error}") from error
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file}: not UTF-8 at byte {error.start}, 0x{error.object[error.start]:02x} ({error.reason}); "
            "convert it, for instance with iconv -t utf-8"
        ) from error
    if "\0" in text:
        raise ValueError(f"{file}: got a byte 0 at {content.index(0)}: binary; accepted: UTF-8 text")
    return text


def _fields(file: Path, text: str, name: str) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: is not JSON: {error}") from error
        if not isinstance(record, dict) or not isinstance(record.get(name), str):
            has = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__
            raise ValueError(f"{where}: got {has}; accepted: an object with the text in {name!r} (data.text_field)")
        yield record[name]
