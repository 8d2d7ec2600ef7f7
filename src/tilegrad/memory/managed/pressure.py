"""Memory pressure: how full the memory of a device is, and how much may be cached on it.

A pressure source maps a device to the used share, in [0, 1], of the memory that this process may use there. On a CPU the
default source returns the largest share among the machine (/proc/meminfo) and the control groups above this process (versions 1
and 2; reclaimable page cache counts as free). On CUDA it uses `mem_get_info`; memory that torch has reserved but does not use
counts as free.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

PressureSource = Callable[[torch.device], float]

EMPTY, SHRINK, GROW = 0.95, 0.85, 0.70
_UNLIMITED = 1 << 60


def memory_pressure(device: torch.device, root: Path = Path("/")) -> float:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return min(1.0, max(0.0, 1 - (free + unused) / total))
    if device.type != "cpu":
        return 0.0
    return max((used / limit for used, limit in (*_cgroups(root), *_machine(root))), default=0.0)


def memory_limit(device: torch.device, root: Path = Path("/")) -> int | None:
    """The most memory of a device that this process may use. On a CPU this is the smallest of the machine's memory and
    the limits of the control groups. None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    if device.type != "cpu":
        return None
    limits = [limit for _, limit in (*_cgroups(root), *_machine(root))]
    if not limits and "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):  # macOS has no /proc
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(limits, default=None)


def memory_available(device: torch.device, root: Path = Path("/")) -> int | None:
    """The memory of a device that this process may still take. On a CPU this is the least that the machine or a control
    group has free. None if unknown."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    if device.type != "cpu":
        return None
    return min((max(0, limit - used) for used, limit in (*_cgroups(root), *_machine(root))), default=None)


def _cgroups(root: Path) -> Iterator[tuple[int, int]]:
    """(used, limit) of each control group with a memory limit, from this process's own group up to the root."""
    table = root / "proc/self/cgroup"
    if not table.is_file():
        return
    for line in table.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = root / "sys/fs/cgroup", ("memory.current", "memory.max", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file")
        else:
            continue
        group = top / path.lstrip("/")
        while group.is_relative_to(top):
            yield from _group(group, *names)
            group = group.parent


def _group(group: Path, used: str, limit: str, reclaimable: str) -> Iterator[tuple[int, int]]:
    if not (group / limit).is_file() or not (group / used).is_file():
        return
    text = (group / limit).read_text(encoding="utf-8").strip()
    if text == "max" or int(text) >= _UNLIMITED:
        return
    cached = 0
    if (group / "memory.stat").is_file():
        stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines())
        cached = int(stat.get(reclaimable, 0))
    yield max(0, int((group / used).read_text(encoding="utf-8")) - cached), int(text)


def _machine(root: Path) -> Iterator[tuple[int, int]]:
    info = root / "proc/meminfo"
    if not info.is_file():
        return
    kib = {line.split(":")[0]: int(line.split()[1]) for line in info.read_text(encoding="utf-8").splitlines()}
    if "MemAvailable" in kib:
        yield 1024 * (kib["MemTotal"] - kib["MemAvailable"]), 1024 * kib["MemTotal"]


class AdaptiveLimit:
    """The limit of the cached bytes of a device. It halves at pressure ≥ 0.85, is 0 at ≥ 0.95, and doubles again at ≤ 0.70.

    `max_bytes` is None until there is pressure, and again once doubling reaches the bytes that were cached at the first
    pressure.
    """

    def __init__(self) -> None:
        self.max_bytes: int | None = None
        self._before = 0

    def feel(self, pressure: float, cached_bytes: int) -> None:
        if not 0.0 <= pressure <= 1.0:
            raise ValueError(f"pressure: got {pressure!r} from the pressure source; accepted: a float from 0 to 1")
        if pressure >= SHRINK:
            if self.max_bytes is None:
                self._before = self.max_bytes = cached_bytes
            self.max_bytes = 0 if pressure >= EMPTY else min(self.max_bytes, cached_bytes) // 2
        elif pressure <= GROW and self.max_bytes is not None:
            self.max_bytes = max(2 * self.max_bytes, self._before // 8, 1)
            if self.max_bytes >= self._before:
                self.max_bytes = None
