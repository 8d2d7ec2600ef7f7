"""The keys of a run, as `example.toml` beside this file states them: name, default and meaning, each once.

The file is what `tilegrad init` writes and what the flags of `tilegrad train` and `plan` are made of. Nothing heavy is
imported: help needs no torch.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

_KEY = re.compile(r"#?(\w+) = (.*?) +# (.*)")


@dataclass(frozen=True, slots=True)
class Key:
    section: str  # model, train or data
    name: str
    default: str  # as TOML has it
    meaning: str


def example() -> str:
    """Every key with its default and meaning, as a TOML file."""
    return resources.files("tilegrad.training").joinpath("example.toml").read_text(encoding="utf-8")


def keys() -> list[Key]:
    """Every key, in the example's order."""
    found, section = [], ""
    for line in example().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif match := _KEY.fullmatch(line):
            found.append(Key(section, *match.groups()))
    return found


def flag_value(text: str) -> Any:
    """What a flag says, read as TOML: 6, 1e-3, true, and what is none of these as the text it is."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
