"""The memory of a run's process: the resident pages of the plan's arenas, and memory outside the plan.

    measured = arenas + unplanned

The arenas are never larger than planned; a page that no step has written is not resident yet. Unplanned memory is the memory
that torch, BLAS and Python have allocated since the moment before the engine was made. On a CPU these are workspaces of BLAS
and oneDNN, thread stacks, and modules imported at the first step; on CUDA they are the workspaces of cuBLAS, and the batches.
Pages of files (code of libraries, the mapped text) are counted separately, because the system drops them when memory is short.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..memory.page import human
from ..memory.types import Role

STATM = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes in use now. `private`: private memory of the process, on CUDA the memory that torch's allocator has given out;
    `files`: mapped files."""

    private: int
    files: int


@dataclass(frozen=True, slots=True)
class Resident:
    planned_bytes: int
    arenas: Mapping[Role, int]  # role → resident bytes of its arena
    unplanned_bytes: int
    file_bytes: int
    device: str

    @property
    def measured_bytes(self) -> int:
        return sum(self.arenas.values()) + self.unplanned_bytes

    @property
    def unplanned(self) -> str:
        """What the unplanned bytes are."""
        return "cuBLAS's workspaces and batches" if self.device == "cuda" else "memory of torch, BLAS and Python"

    def __str__(self) -> str:
        return (
            f"{human(self.measured_bytes)} = {human(sum(self.arenas.values()))} of the plan"
            f" + {human(self.unplanned_bytes)} {self.unplanned}"
        )


def process_memory(device: torch.device) -> ProcessMemory:
    """The memory in use now; on systems without /proc, the peak of all resident memory."""
    if device.type == "cuda":
        return ProcessMemory(torch.cuda.memory_allocated(device), 0)
    if not STATM.exists():
        import resource  # not on Windows

        return ProcessMemory(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0)  # in bytes on macOS
    _, resident, shared, *_ = map(int, STATM.read_text(encoding="ascii").split())
    return ProcessMemory((resident - shared) * mmap.PAGESIZE, shared * mmap.PAGESIZE)


def resident(
    arenas: Mapping[Role, Tensor], planned_bytes: int, before: ProcessMemory, device: torch.device
) -> Resident:
    """The memory that was added since `before`."""
    now, own = process_memory(device), {role: resident_bytes(arena) for role, arena in arenas.items()}
    unplanned = max(0, now.private - before.private - sum(own.values()))
    return Resident(planned_bytes, own, unplanned, max(0, now.files - before.files), device.type)


def resident_bytes(x: Tensor) -> int:
    """Resident bytes of a contiguous tensor: all pages except those that were never written."""
    if x.device.type != "cpu" or not x.nbytes:
        return x.nbytes
    page = mmap.PAGESIZE
    first, last = x.data_ptr(), x.data_ptr() + x.nbytes
    begin = first // page * page
    pages = -(-(last - begin) // page)
    seen = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(last - begin), seen):
        raise OSError(ctypes.get_errno(), "mincore")
    resident = torch.frombuffer(seen, dtype=torch.uint8).bitwise_and_(1).long() * page
    resident[0] -= (first - begin) * int(resident[0] > 0)
    resident[-1] -= (begin + pages * page - last) * int(resident[-1] > 0)
    return int(resident.sum())
