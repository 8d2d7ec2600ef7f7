"""`tilegrad` with a fault, for torchrun. Its arguments: FAULT RANK STEP, then those of tilegrad.

asleep    the rank sleeps before it reads the data of the step
silent    from the step on no sum over ranks ends or raises, on any rank
torn      the rank is killed in the step's save, when its own file is written; not after a restart by torchrun
killed    the rank is killed before it reads the data of the step; after the nth restart another
          rank is killed n steps later, ten times in all
other seed   the rank has another seed
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch

from tilegrad.cli import main
from tilegrad.engine.dist.mesh import Mesh

ASLEEP_S = 20
enter = Mesh.at


def at(mesh: Mesh, place: str, **options: bool) -> None:
    """Replaces `Mesh.at`: calls it, then causes the fault if this is its place."""
    enter(mesh, place, **options)
    fault, rank, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    reading = f"step {step}: reading data"
    if fault == "asleep" and (mesh.rank, place) == (rank, reading):
        print("asleep", flush=True)
        time.sleep(ASLEEP_S)
    if fault == "silent" and place == reading:
        torch.distributed.all_reduce = lambda *_given, **_options: time.sleep(3600)
    if fault == "torn" and (mesh.rank, place, attempt) == (rank, f"step {step}: saving", 0):
        die_when_written()
    next_one = ((rank + attempt) % mesh.world, f"step {step + attempt}: reading data")
    if fault == "killed" and attempt < 10 and (mesh.rank, place) == next_one:
        os.kill(os.getpid(), signal.SIGKILL)


def die_when_written() -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    writer: Any = HuggingFaceStorageWriter
    write = writer.write_data

    def write_data(*given: Any) -> None:
        write(*given).wait()
        os.kill(os.getpid(), signal.SIGKILL)

    writer.write_data = write_data


if __name__ == "__main__":
    faulty: Any = Mesh
    faulty.at = at
    other = sys.argv[1] == "other seed" and os.environ["RANK"] == sys.argv[2]
    raise SystemExit(main(sys.argv[4:] + (["--seed", "1234"] if other else [])))
