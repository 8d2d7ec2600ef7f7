"""Ranks for tests: processes that start once, have a mesh, and run the functions that a test sends them.

    ranks.run(check, 3)        runs check(mesh, 3) on every rank; returns the results in the order of ranks

A function is sent by name, so it is at the top of its module. If it raises on a rank, `run` raises with that rank's
traceback, and the next `run` starts new processes, because the other ranks may still wait in a collective.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch

from support.forked import CONTEXT
from tilegrad.engine.dist.mesh import Mesh

LIMIT_S = 120.0


class Ranks:
    def __init__(self, world: int, timeout_s: float = 30.0) -> None:
        self.world, self.timeout_s = world, timeout_s
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, check: Callable[..., Any], *arguments: Any) -> list[Any]:
        if not self._processes:
            self._spawn()
        for pipe in self._pipes:
            pipe.send((check, arguments))
        replies = [pipe.recv() if pipe.poll(LIMIT_S) else (False, f"silent for {LIMIT_S} s") for pipe in self._pipes]
        failed = [f"rank {rank}: {result}" for rank, (good, result) in enumerate(replies) if not good]
        if failed:
            self.close()
            raise AssertionError("\n".join(failed))
        return [result for _, result in replies]

    def _spawn(self) -> None:
        """This process holds the store, as torchrun does."""
        distributed: Any = torch.distributed  # its type stubs lack TCPStore
        store = distributed.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=self.timeout_s))
        for rank in range(self.world):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=_serve, args=(theirs, rank, self.world, store.port, self.timeout_s), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._store = store

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []


def _noted() -> AbstractContextManager[None]:
    if "CALLED" not in os.environ:
        return nullcontext()
    from .called import on_a_rank  # which imports pytest

    return on_a_rank()


def _serve(pipe: Connection, rank: int, world: int, port: int, timeout_s: float) -> None:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    torch.set_num_threads(1)
    with _noted():
        mesh = Mesh("cpu", timeout_s)
    with mesh.watch():
        while True:
            mesh.at("between two tests", alone=True)
            check, arguments = pipe.recv()
            mesh.at(check.__name__)
            try:
                with _noted():
                    result = check(mesh, *arguments)
                pipe.send((True, result))
            except BaseException:
                pipe.send((False, traceback.format_exc()))
                raise
