"""The environment of a measurement: device, versions, commit, date."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from .. import __version__


def environment(device: torch.device, dtype: torch.dtype) -> dict[str, object]:
    commit = ""
    with suppress(OSError, subprocess.CalledProcessError):
        where = Path(__file__).parent
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=where, capture_output=True, text=True, check=True
        ).stdout.strip()
    triton_version = None
    with suppress(ImportError):
        import triton

        triton_version = triton.__version__
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": name,
        "dtype": str(dtype).removeprefix("torch."),
        "tilegrad": __version__,
        "commit": commit or "unknown",
        "torch": torch.__version__,
        "triton": triton_version,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def print_results(lines: Sequence[str], about: Mapping[str, object], *, json: bool, out: str | None) -> bool:
    """Appends the JSON lines of a benchmark to the file `out`. With `json`, prints them; otherwise prints a line about the
    environment, and the caller prints a table after it. Returns `json`."""
    if out:
        with open(out, "a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    print("\n".join(lines) if json else ", ".join(f"{name} {x}" for name, x in about.items() if x is not None))
    return json
