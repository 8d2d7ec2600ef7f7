"""What the commands' arguments share: spellings, defaults' sources, units."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeAlias

Command = Callable[[argparse.Namespace], int]
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
PRESETS = ("tiny", "gpt2", "gpt2-medium", "gpt2-xl", "llama-135m")  # of model/config.py, which loads torch
DTYPES = ("float32", "float64", "bfloat16")  # torch's names, everywhere


def add_command(commands: Commands, name: str, text: str, run: Command | None = None) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    command.set_defaults(run=run)
    return command


def byte_count(text: str) -> int:
    """1500000000, 1.5GB, 1400MiB."""
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "B": 1, "": 1}
    number = text.strip().rstrip("KMGTIBkmgtib")
    unit = text.strip()[len(number) :].upper()
    try:
        return int(float(number) * units[unit])
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(
            f"got {text!r}; accepted: bytes, or a number with KB, MB, GB, KiB, MiB or GiB"
        ) from None
