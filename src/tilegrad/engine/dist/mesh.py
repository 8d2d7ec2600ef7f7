"""The ranks of a run: the process group of torch.distributed, the collectives of a step, and the search for a missing rank when
a run hangs.

torchrun sets rank and world size in the environment. Collectives on CPU tensors use gloo, those on GPU tensors NCCL. Without
torchrun, or with one rank, there is no process group, and every collective is a no-op.

A collective that waits for a lost rank fails with an error that names no rank, and on a GPU it may never fail. So a heartbeat
thread on each rank publishes a `Note` (beat, number of collectives entered, place) in the store every second. After a failure
two snapshots of the notes are compared. A rank whose beat has not changed is dead or stopped. The live ranks that have entered
the fewest collectives are behind, and the other live ranks wait for them. A rank that gives up because of another rank
publishes this before it ends, so that it does not count as dead. No clocks are compared.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed both functions
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_stores: Any = dist  # torch's type stubs lack PrefixStore and TCPStore
BEAT_S = 1.0
HUNG = 13  # exit code of a process that the heartbeat thread ended
_MOST_NAMED = 8  # the most ranks that a message names
T = TypeVar("T")
Pending = dist.Work | None  # a started collective; None with one rank


class RankLost(RuntimeError):
    """A collective did not complete. The message names the ranks for which the collective waits, and their places."""


class Note(NamedTuple):
    """A note that a rank publishes: a beat that increases while its process lives, the number of collectives that it has
    entered, its place in the program, and whether it gave up because of another rank."""

    beat: int
    entered: int
    place: str
    gave_up: bool = False


def missing(before: dict[int, Note], after: dict[int, Note]) -> str:
    """A message that names the ranks for which the other ranks wait, from two snapshots of notes more than one beat apart."""
    unchanged = [rank for rank in after if before[rank].beat == after[rank].beat]
    silent = [rank for rank in unchanged if not after[rank].gave_up]
    alive = [rank for rank in after if rank not in silent and not after[rank].gave_up]
    most = max(note.entered for note in after.values())
    least = min((after[rank].entered for rank in alive), default=most)
    behind = [rank for rank in alive if after[rank].entered == least < most]
    named = [f"rank {rank} is dead or stopped, last at {after[rank].place!r}" for rank in silent]
    named += [f"rank {rank} is behind, at {after[rank].place!r}" for rank in behind]
    named = named or [f"rank {rank} gave up first, at {after[rank].place!r}" for rank in unchanged]
    more = f"; and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    return "; ".join(named[:_MOST_NAMED]) + more or "every rank is alive and waits: the network between them is down"


class Mesh:
    """The ranks that torchrun launched or, with `alone`, only this process. A collective waits up to `timeout_s` for a rank.

    rank, world               the number of this process, and how many processes the run has
    local_rank, local_world   the number of this process on its node, and how many processes the node has
    device                    the device of this rank: cpu, or the GPU with the number of its local rank
    """

    def __init__(self, device: torch.device | str = "cpu", timeout_s: float = 600.0, *, alone: bool = False) -> None:
        env = {} if alone else os.environ
        self.rank, self.world = int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1))
        self.local_rank, self.local_world = int(env.get("LOCAL_RANK", 0)), int(env.get("LOCAL_WORLD_SIZE", self.world))
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"timeout: got {timeout_s} s; accepted: a finite number above 0")
        self.timeout_s = timeout_s
        self.place, self.entered = "start", 0
        self._since, self._firsts = time.monotonic(), 0
        self._beat, self._gave_up = 0, False
        self.device = torch.device(device)
        self.group: dist.ProcessGroup | None = None  # for collectives on tensors
        self.host_group: dist.ProcessGroup | None = None  # for objects and barriers: always gloo
        if self.world == 1:
            return
        if self.device.type == "cuda":
            if self.local_world > torch.cuda.device_count():
                raise ValueError(
                    f"device: got {device} with {self.local_world} ranks on this node; accepted: at most "
                    f"{torch.cuda.device_count()}, one for each GPU"
                )
            self.device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(self.device)
        limit = timedelta(seconds=timeout_s)
        self._store = _store(self.rank, self.world, limit)
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        store = _stores.PrefixStore("group", self._store)
        dist.init_process_group(backend, rank=self.rank, world_size=self.world, store=store, timeout=limit)
        self.group = dist.group.WORLD
        self.host_group = self.group if backend == "gloo" else dist.new_group(backend="gloo", timeout=limit)

    # ── collectives: in place on slices of arenas, without allocation; wait=False returns an argument for `wait` ──

    def all_reduce(self, x: Tensor, *, wait: bool = True) -> Pending:
        """x = Σ over ranks of x."""
        return self.run(lambda: dist.all_reduce(x, group=self.group, async_op=not wait), "all_reduce")

    def maximum(self, x: Tensor) -> None:
        """x = the maximum over ranks of x."""
        self.run(lambda: dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group), "maximum")

    def reduce_scatter(self, x: Tensor, *, out: Tensor, wait: bool = True) -> Pending:
        """out = the slice of this rank of Σ over ranks of x. x has `world` equal slices, and `out` may be this slice of x."""
        return self.run(lambda: _reduce_scatter(out, x, group=self.group, async_op=not wait), "reduce_scatter")

    def all_gather(self, part: Tensor, *, out: Tensor, wait: bool = True) -> Pending:
        """out = the parts of all ranks, in the order of ranks. `part` may be the slice of this rank in `out`."""
        return self.run(lambda: _all_gather(out, part, group=self.group, async_op=not wait), "all_gather")

    def wait(self, work: Pending) -> None:
        """Waits for a collective that was started with wait=False. The wait is not counted in `entered`, because another rank
        may have nothing to wait for."""
        if work is not None:
            self._guarded(work.wait, "wait")

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in the order of ranks. They are sent as JSON."""
        if self.world == 1:
            return [value]
        text = json.dumps(value, allow_nan=False).encode("utf-8")
        longest = torch.tensor(len(text))
        self.run(lambda: dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.host_group), "gather")
        encoded = torch.frombuffer(bytearray(text.ljust(int(longest))), dtype=torch.uint8)  # JSON ignores trailing spaces
        texts = torch.empty(self.world, len(encoded), dtype=torch.uint8)
        self.run(lambda: _all_gather(texts.view(-1), encoded, group=self.host_group), "gather")
        return [json.loads(bytes(row.numpy())) for row in texts]

    def sum(self, *values: float) -> list[float]:
        """Σ over ranks of each value, on the host; integers are exact below 2⁵³."""
        x = torch.tensor(values, dtype=torch.float64)
        self.run(lambda: dist.all_reduce(x, group=self.host_group), "sum")
        return x.tolist()

    def barrier(self) -> None:
        self.run(lambda: dist.barrier(group=self.host_group), "barrier")

    def first(self, work: Callable[[], T]) -> T:
        """Runs `work` on rank 0, then on the first rank of each other node, then on all other ranks. Waiting ranks poll the
        store, without a timeout, instead of waiting in a collective. If `work` fails, all ranks that wait for it fail."""
        self._firsts += 1
        node = self.rank - self.local_rank  # the first rank of this node
        awaited = None if self.rank == 0 else 0 if self.rank == node else node
        try:
            if awaited is not None:
                self._await(f"first/{self._firsts}/{awaited}")
            self.at(self.place, alone=True)
            result = work()
            self.at(self.place)
        except BaseException:
            self._publish("failed")
            raise
        self._publish("done")
        return result

    def _publish(self, how: str) -> None:
        if self.world > 1 and self.local_rank == 0:
            self._store.set(f"first/{self._firsts}/{self.rank}", how)

    def _await(self, key: str) -> None:
        """Polls, because a blocking wait on the store would block the heartbeat too."""
        self.at(self.place, alone=True)
        while not self._store.check([key]):
            time.sleep(BEAT_S / 10)
        if self._store.get(key) == b"failed":
            self._give_up()
            raise RankLost(f"rank {self.rank} at {self.place!r}: rank {key.rsplit('/', 1)[1]} failed there")

    def at(self, place: str, *, alone: bool = False) -> None:
        """Sets the place of this rank in the program. `alone`: no collective waits for this rank, so it may take any time."""
        self.place, self._since = place, math.inf if alone else time.monotonic()

    def run(self, collective: Callable[[], T], name: str) -> T | None:
        """Runs a collective, which all ranks must enter in the same order. Raises `RankLost`, which names the lost rank. With one
        rank this is a no-op."""
        if self.world == 1:
            return None
        self.entered += 1
        return self._guarded(collective, name)

    def _guarded(self, work: Callable[[], T], name: str) -> T:
        self._since = time.monotonic()
        try:
            return work()
        except RuntimeError as error:
            self._give_up()
            message = str(error).partition("\n")[0]
            raise RankLost(
                f"rank {self.rank}, {name} at {self.place!r}: {self.missing()}; torch says: {message}"
            ) from error

    def _give_up(self) -> None:
        """Publishes that this rank is about to end because another rank is lost."""
        self._gave_up = True
        self._write()

    def _write(self) -> bool:
        """Publishes the note of this rank. Returns False if the store is gone; torchrun then ends this process."""
        self._beat += 1
        try:
            write_note(self._store, self.rank, Note(self._beat, self.entered, self.place, self._gave_up))
        except RuntimeError:
            return False
        return True

    def missing(self) -> str:
        """A message that names the ranks for which this rank waits. The call takes 2.5 beats."""
        try:
            before = read_notes(self._store, self.world)
            time.sleep(2.5 * BEAT_S)
            return missing(before, read_notes(self._store, self.world))
        except RuntimeError:
            return "the store is gone: the torchrun that ran it has ended"

    @contextmanager
    def watch(self) -> Iterator[None]:
        """In this context, the heartbeat thread publishes the notes of this rank. If this rank stays at one place longer than a
        collective may wait, and no error was raised, the thread prints which ranks are missing and ends the process with exit
        code 13."""
        if self.world == 1:
            yield
            return
        done = threading.Event()
        thread = threading.Thread(target=self._beat_until, args=(done,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _beat_until(self, done: threading.Event) -> None:
        patience = self.timeout_s + 10 * BEAT_S
        while self._write():
            waited = time.monotonic() - self._since
            if waited > patience:
                patience = float("inf")
                threading.Thread(target=self._end, args=(waited,), daemon=True).start()
            if done.wait(BEAT_S):
                return

    def _end(self, waited: float) -> None:
        self._give_up()
        message = f"tilegrad: rank {self.rank} has been at {self.place!r} for {waited:.0f} s: {self.missing()}"
        print(message, file=sys.stderr, flush=True)
        os._exit(HUNG)

    def neighbours(self, n: int) -> Neighbours:
        """Divides the ranks into groups of n (0 … n − 1, n … 2n − 1, and so on) and returns the group of this rank. All ranks must
        call this."""
        return Neighbours(self, n)

    def close(self) -> None:
        if self.world > 1:
            dist.destroy_process_group()


class Neighbours:
    """n adjacent ranks of a mesh. Every group must enter the same number of collectives, because the mesh counts them."""

    def __init__(self, mesh: Mesh, n: int) -> None:
        self.rank, self.world, self._mesh = mesh.rank % n, n, mesh
        starts, limit = range(0, mesh.world, n), timedelta(seconds=mesh.timeout_s)
        self._group = [dist.new_group(list(range(i, i + n)), limit) for i in starts][mesh.rank // n]

    def all_reduce(self, x: Tensor) -> None:
        """x = Σ over these ranks of x."""
        self._mesh.run(lambda: dist.all_reduce(x, group=self._group), "all_reduce")

    def reduce_scatter(self, x: Tensor, *, out: Tensor) -> None:
        """`Mesh.reduce_scatter` over these ranks."""
        self._mesh.run(lambda: _reduce_scatter(out, x, group=self._group), "reduce_scatter")

    def all_gather(self, part: Tensor, *, out: Tensor) -> None:
        """`Mesh.all_gather` over these ranks."""
        self._mesh.run(lambda: _all_gather(out, part, group=self._group), "all_gather")


def write_note(store: Store, rank: int, note: Note) -> None:
    store.set(f"note/{rank}", f"{note.beat} {note.entered} {int(note.gave_up)} {note.place}")


def read_notes(store: Store, world: int) -> dict[int, Note]:
    notes = {}
    for rank in range(world):
        text = store.get(f"note/{rank}").decode() if store.check([f"note/{rank}"]) else "0 0 0 nowhere yet"
        beat, entered, gave_up, place = text.split(" ", 3)
        notes[rank] = Note(int(beat), int(entered), place, gave_up == "1")
    return notes


def said_already(sentence: str) -> bool:
    """Whether another rank has called this with the same sentence, so that an error of every rank is printed by one rank. Needs
    the store that torchrun keeps for its ranks, but no process group. False without such a store."""
    env = os.environ
    if int(env.get("WORLD_SIZE", "1")) == 1 or env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    try:
        store = _store(int(env["RANK"]), int(env["WORLD_SIZE"]), timedelta(seconds=10))
        return int(store.add(f"said/{hashlib.sha256(sentence.encode()).hexdigest()}", 1)) > 1
    except RuntimeError:  # the store is gone, and so are the ranks that might have printed the sentence
        return False


def _store(rank: int, world: int, limit: timedelta) -> Store:
    """The store at MASTER_ADDR. torchrun keeps one store over restarts, so a restarted rank could read the address of a dead
    rank (pytorch#135712). On one node, the keys of each attempt therefore have their own prefix. On several nodes the number of
    attempts may differ between nodes, and torchrun needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 instead."""
    env = os.environ
    shared = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = _stores.TCPStore(
        env["MASTER_ADDR"], int(env["MASTER_PORT"]), world, is_master=rank == 0 and not shared, timeout=limit
    )
    one_node = env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"]) == env["WORLD_SIZE"]
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0") if shared and one_node else "any"
    prefixed: Store = _stores.PrefixStore(f"tilegrad {attempt}", store)
    return prefixed
