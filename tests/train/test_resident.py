"""The measured bytes of arenas equal the plan, and unplanned memory is counted separately."""

from __future__ import annotations

import mmap
import subprocess
import sys

import torch

from tilegrad.training.resident import ProcessMemory, process_memory, resident, resident_bytes

CPU = torch.device("cpu")
PAGE = mmap.PAGESIZE


def fresh(pages: int) -> torch.Tensor:
    """Private memory that was never touched, like a new arena, without huge pages."""
    region = mmap.mmap(-1, pages * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        region.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(region, dtype=torch.uint8)


def test_only_pages_that_were_written_are_resident() -> None:
    x = fresh(64)
    assert resident_bytes(x) == 0
    x[PAGE * 3 + 5] = 1
    x[PAGE * 7 : PAGE * 9] = 1
    assert resident_bytes(x) == 3 * PAGE
    part = x[PAGE * 3 + 100 : PAGE * 8 + 200]  # some bytes of pages 3, 7 and 8 belong to it
    assert resident_bytes(part) == (PAGE - 100) + PAGE + 200
    assert resident_bytes(x[PAGE * 3 + 100 : PAGE * 3 + 200]) == 100
    assert resident_bytes(x[:0]) == 0


def test_unplanned_memory_is_the_growth_without_the_arenas() -> None:
    for _ in range(5):  # torch's allocator may return pages of other tests in between
        x = torch.empty(0)  # frees the memory of the last window
        x, now = fresh(1024), process_memory(CPU)
        x.fill_(1)
        before = ProcessMemory(now.private - 5 * 2**20, now.files - 3 * 2**20)
        found = resident({"params": x}, x.nbytes, before, CPU)
        assert found.arenas == {"params": x.nbytes}
        apart = abs(found.unplanned_bytes - 5 * 2**20), abs(found.file_bytes - 3 * 2**20)
        if max(apart) < 2**20:
            break
    assert max(apart) < 2**20, found
    assert found.measured_bytes == x.nbytes + found.unplanned_bytes
    assert "memory of torch, BLAS and Python" in str(found)
    before = ProcessMemory(process_memory(CPU).private + 2**30, 0)  # memory was freed since, and the arenas replaced it
    assert resident({"params": x}, x.nbytes, before, CPU).unplanned_bytes == 0


def test_the_arenas_of_a_trained_model_have_exactly_the_bytes_of_the_plan() -> None:
    """It runs in its own process. Less than 16 MiB are unplanned for any model."""
    code = """
import torch
from tilegrad import Engine
from tilegrad.model.config import PRESETS
from tilegrad.training.resident import process_memory, resident
cpu = torch.device("cpu")
torch.ones(512, 512).mm(torch.ones(512, 512))
before = process_memory(cpu)
engine = Engine(PRESETS["tiny"], 8, 128)
tokens = torch.randint(0, 256, (8, 128))
for _ in range(2):
    engine.step(tokens, tokens, learning_rate=1e-3)
found = resident(engine.arenas.bytes, engine.plan.peak_bytes, before, cpu)
print(sum(found.arenas.values()), engine.plan.peak_bytes, found.unplanned_bytes)
"""
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    arenas, planned, unplanned = map(int, out.split())
    assert arenas == planned
    assert unplanned < 16 * 2**20
