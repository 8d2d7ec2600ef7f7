"""Rules for reading files from untrusted sources.

a name    must be the name of a file in its folder: no path, and no link that leaves the folder. The one exception is the cache
          of Hugging Face, where models--NAME/snapshots/REVISION/FILE is a link into models--NAME/blobs
a file    must be a regular file. A folder, a FIFO or a device is refused before it is opened, because a FIFO could block for
          ever
JSON      must be UTF-8 of at most 256 MiB, nested at most 100 deep, without NaN, infinity or integers that overflow a float

Every error is a ValueError or a FileNotFoundError with the file and the reason.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from safetensors import SafetensorError, safe_open

MAX_JSON_BYTES = 1 << 28
MAX_DEPTH = 100
_MAX_INT_BITS = 1023  # float() overflows for integers with more bits


def regular_file(path: Path, accepted: str = "a file") -> Path:
    """`path`, if it is a regular file or a link to a regular file; otherwise raises."""
    try:
        if path.is_file():
            return path
        exists = path.exists() or path.is_symlink()
    except (OSError, ValueError) as error:  # a name that is too long or contains a zero byte
        raise ValueError(f"{shown(str(path))}: is not a file name ({error}); accepted: {accepted}") from error
    if exists:
        what = "a folder" if path.is_dir() else "a link to nothing" if path.is_symlink() else "a FIFO or a device"
        raise ValueError(f"{path}: got {what}; accepted: {accepted}")
    raise FileNotFoundError(f"{path}: no such file; accepted: {accepted}")


def file_in(folder: Path, name: object, named_by: str = "") -> Path:
    """The file `name` in a folder, after a check of its name by the rule above. `named_by`: the file that contains the name."""
    where = f"{named_by}: " if named_by else f"{folder}: "
    if not isinstance(name, str) or name in ("", ".", "..") or {"/", "\\", "\0"} & {*name}:
        raise ValueError(f"{where}got the name {shown(name)}; accepted: the name of a file in {folder}")
    path = folder / name
    try:
        target, home = path.resolve(), folder.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a cycle of links, or a name that is too long
        raise ValueError(f"{shown(str(path))}: can't be opened: {error}") from error
    if not target.is_relative_to(home) and target.parent != _blobs(home):
        raise ValueError(
            f"{path}: got a link to {target}; accepted: a file in the folder, or in blobs/ of the same model in Hugging "
            "Face's cache"
        )
    return regular_file(path)


def _blobs(folder: Path) -> Path | None:
    """The folder to which the links of a snapshot in the cache of Hugging Face point; None for other folders."""
    model = folder.parent.parent
    is_snapshot = folder.parent.name == "snapshots" and model.name.startswith("models--")
    return model / "blobs" if is_snapshot else None


def read_bytes(path: Path) -> bytes:
    """The content of a file of at most MAX_JSON_BYTES."""
    size = regular_file(path).stat().st_size
    if size > MAX_JSON_BYTES:
        raise ValueError(f"{path}: got {size:,} bytes; accepted: at most {MAX_JSON_BYTES:,}")
    return path.read_bytes()


def read_json(path: Path) -> object:
    """The content of a JSON file."""
    return parse_json(decoded(path), str(path))


def decoded(path: Path) -> str:
    """The text of a file, without a byte order mark."""
    try:
        return read_bytes(path).decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 at byte {error.start} ({error.reason})") from error


def parse_json(text: str, where: str) -> object:
    try:
        value: object = json.loads(text, parse_constant=_no_constant)
    except RecursionError as error:
        raise too_deep(text, where) from error
    except ValueError as error:
        raise ValueError(f"{where}: is not JSON: {error}") from error
    check_values(value, where, text)
    return value


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


def check_values(value: object, where: str, text: str = "") -> None:
    """Raises if values are nested too deep, or if a number is not finite or overflows a float."""
    level: list[tuple[object, str]] = [(value, "")]
    for _ in range(MAX_DEPTH):
        below: list[tuple[object, str]] = []
        for inside, name in level:
            if isinstance(inside, Mapping):
                below += ((inner, str(key)) for key, inner in inside.items())
            elif isinstance(inside, list | tuple):
                below += ((inner, name) for inner in inside)
            elif isinstance(inside, int) and inside.bit_length() > _MAX_INT_BITS:
                got = f"{where}: {shown(name)}: got an integer of {inside.bit_length():,} bits"
                raise ValueError(f"{got}; accepted: at most {_MAX_INT_BITS:,} bits")
            elif isinstance(inside, float) and not math.isfinite(inside):
                raise ValueError(f"{where}: {shown(name)}: got {inside}; accepted: a finite number")
        if not below:
            return
        level = below
    raise too_deep(text, where)


def too_deep(text: str, where: str) -> ValueError:
    """The error for JSON or TOML that is nested too deep, with the number of the first line that is too deep."""
    depth, quoted, escaped, line = 0, "", False, 1
    for c in text:
        line += c == "\n"
        if escaped:
            escaped = False
        elif quoted:
            escaped, quoted = c == "\\", "" if c in (quoted, "\n") else quoted
        elif c in "\"'":
            quoted = c
        elif c in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                return ValueError(
                    f"{where}, line {line}: got values nested deeper than {MAX_DEPTH}; accepted: fewer levels"
                )
        elif c in "]}":
            depth -= 1
    return ValueError(f"{where}: got values nested deeper than {MAX_DEPTH}; accepted: fewer levels")


def open_tensors(path: Path) -> safe_open:
    """Opens a safetensors file, which is memory-mapped, after a check of its header."""
    try:
        return safe_open(regular_file(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: is not a safetensors file, or is damaged: {error}") from error


@contextmanager
def naming(where: object) -> Iterator[None]:
    """In this context, a ValueError begins with `where`, such as a file."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def shown_keys(record: Mapping[str, object]) -> str:
    """The first keys of a record, for an error."""
    return ", ".join(map(shown, [*record][:20])) or "none"


def shown(value: object) -> str:
    """repr of a value for an error, cut if it is long."""
    text = repr(value[:100] if isinstance(value, str | list | tuple) else value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def refuse(config: object, name: str, accepted: str) -> NoReturn:
    """Raise because of the value of a field. `name` may begin with the field's section, as in optimizer.name."""
    raise ValueError(f"{name}: got {shown(getattr(config, name.rpartition('.')[2]))}; accepted: {accepted}")


def check_choice(config: object, name: str, choices: Collection[object], between: str = ", ") -> None:
    if getattr(config, name.rpartition(".")[2]) not in choices:
        refuse(config, name, between.join(map(repr, choices)))
