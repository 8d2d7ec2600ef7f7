"""The keys of a run, from `example.toml` in this folder: the name, default and meaning of each key.

`tilegrad init` writes this file. The flags of `tilegrad train` and `plan` are made from this file, without importing torch.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from importlib import resources

_KEY = re.compile(r"#?(\w+) = (.*?) +# (.*)")


@dataclass(frozen=True, slots=True)
class Key:
    section: str  # model, train, optimizer, data or lora
    name: str
    default: str  # as written in TOML
    meaning: str


def example() -> str:
    """Every key with its default and meaning, as a TOML file."""
    return resources.files("tilegrad.training").joinpath("example.toml").read_text(encoding="utf-8")


def finetune() -> str:
    """A run that fine-tunes a model, as a TOML file with two names to fill in."""
    return resources.files("tilegrad.training").joinpath("finetune.toml").read_text(encoding="utf-8")


def keys() -> list[Key]:
    """Every key, in the example's order."""
    keys, section = [], ""
    for line in example().splitlines():
        if line.startswith("["):
            section = line[1:].partition("]")[0]
        elif match := _KEY.fullmatch(line):
            keys.append(Key(section, *match.groups()))
    return keys


def flag_value(text: str) -> object:
    """The value of a flag, read as TOML: 6, 1e-3, true; anything else is a string."""
    try:
        value: object = tomllib.loads(f"value = {text}")["value"]
        return value
    except (ValueError, RecursionError):
        return text
