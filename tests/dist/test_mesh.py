"""The ranks of a run: collectives on slices of one buffer, names of missing ranks, work that rank 0 does first."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.ranks import Ranks

from tilegrad.cli.faults import complain
from tilegrad.engine.dist.mesh import HUNG, Mesh, Note, RankLost, missing, read_notes, write_note


def collectives(mesh: Mesh) -> list[list[float]]:
    """Runs each collective in place on a slice of one buffer, and waits for it at once or later."""
    x = torch.arange(8.0) * (mesh.rank + 1)
    mine = slice(4 * mesh.rank, 4 * mesh.rank + 4)
    found = []
    for wait in (True, False):
        y = x.clone()
        mesh.wait(mesh.reduce_scatter(y, out=y[mine], wait=wait))
        found.append(y[mine].tolist())
        mesh.wait(mesh.all_gather(y[mine], out=y, wait=wait))
        found.append(y.tolist())
        y = x.clone()
        mesh.wait(mesh.all_reduce(y[2:4], wait=wait))
        found.append(y.tolist())
    mesh.barrier()
    return [*found, [float(other["rank"]) for other in mesh.gather({"rank": mesh.rank})]]


def test_collectives_work_in_place(two_ranks: Ranks) -> None:
    whole = [3.0 * i for i in range(8)]
    for rank, found in enumerate(two_ranks.run(collectives)):
        summed = [i * (rank + 1.0) if i not in (2, 3) else 3.0 * i for i in range(8)]
        assert found == [whole[4 * rank : 4 * rank + 4], whole, summed] * 2 + [[0.0, 1.0]]


def of_neighbours(mesh: Mesh, n: int) -> tuple[list[int], list[list[float]], int]:
    """Rank and world of a group of n, its collectives, and how many of them the mesh counts."""
    before, group = mesh.entered, mesh.neighbours(n)
    mine = slice(group.rank * 4, group.rank * 4 + 4)
    x = torch.arange(4.0 * n) * (mesh.rank + 1)
    y, z = x.clone(), x.clone()
    group.reduce_scatter(y, out=y[mine])
    group.all_gather(y[mine], out=y)
    group.all_reduce(z)
    return [group.rank, group.world], [y.tolist(), z.tolist()], mesh.entered - before


def test_neighbours_have_their_own_collectives(two_ranks: Ranks) -> None:
    both, alone = two_ranks.run(of_neighbours, 2), two_ranks.run(of_neighbours, 1)
    for rank in range(2):
        assert both[rank] == ([rank, 2], [[3.0 * i for i in range(8)]] * 2, 3)
        assert alone[rank] == ([0, 1], [[(rank + 1.0) * i for i in range(4)]] * 2, 3)


def sent(mesh: Mesh) -> list[Any]:
    """Gathers JSON values of every kind, with a different length on each rank. Other values are refused and not sent."""
    for value in (math.nan, {1, 2}):
        with pytest.raises((ValueError, TypeError), match="JSON"):
            mesh.gather(value)
    return mesh.gather({"name": "é" * mesh.rank, "none": None, "list": [mesh.rank, 0.1, True, 2**53 + 1]})


def test_gather_sends_json(two_ranks: Ranks) -> None:
    want = [{"name": "é" * rank, "none": None, "list": [rank, 0.1, True, 2**53 + 1]} for rank in range(2)]
    assert two_ranks.run(sent) == [want, want]


def firsts(mesh: Mesh, folder: str) -> tuple[list[str], str]:
    """Rank 0 writes while the other rank waits. Then rank 0 fails, and the other rank with it."""
    file = Path(folder) / "order"

    def work() -> list[str]:
        seen = file.read_text(encoding="utf-8").split() if file.exists() else []
        file.write_text(" ".join([*seen, str(mesh.rank)]), encoding="utf-8")
        return seen

    def fail() -> None:
        raise KeyError("nothing here")

    found = mesh.first(work)
    with pytest.raises((KeyError, RankLost)) as error:
        mesh.first(fail)
    return found, str(error.value)


def test_rank_0_runs_first_and_its_failure_reaches_all_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    (seen0, error0), (seen1, error1) = two_ranks.run(firsts, str(tmp_path))
    assert (seen0, seen1) == ([], ["0"])
    assert "nothing here" in error0 and "rank 0 failed" in error1


def lost(mesh: Mesh) -> str:
    """The error of a failed collective names missing ranks, and here only the place, because no rank is missing. A rank
    that came here much later would be behind."""
    mesh.barrier()
    mesh.at("step 3: summing")
    with pytest.raises(RankLost) as error:
        mesh.wait(FAILS)
    return str(error.value)


def _fail() -> None:
    raise RuntimeError("Connection closed by peer")


FAILS: Any = SimpleNamespace(wait=_fail)  # a collective


def test_a_failed_collective_names_the_place(two_ranks: Ranks) -> None:
    for rank, message in enumerate(two_ranks.run(lost)):
        assert message.startswith(f"rank {rank}, wait at 'step 3: summing': every rank is alive")


def test_missing_ranks_are_found_in_the_notes_of_all_ranks() -> None:
    distributed: Any = torch.distributed  # torch's types leave HashStore out
    store = distributed.HashStore()
    for rank, note in enumerate(
        [Note(7, 40, "step 4: summing"), Note(7, 38, "step 4: reading data"), Note(3, 38, "x")]
    ):
        write_note(store, rank, note)
    before = read_notes(store, 4)
    for rank, note in enumerate([Note(9, 40, "step 4: summing"), Note(9, 38, "step 4: reading data")]):
        write_note(store, rank, note)
    message = missing(before, read_notes(store, 4))
    assert message == (
        "rank 2 is dead or stopped, last at 'x'; rank 3 is dead or stopped, last at 'nowhere yet'; "
        "rank 1 is behind, at 'step 4: reading data'"
    )


def test_a_rank_that_gave_up_because_another_died_is_not_named_as_dead() -> None:
    """Rank 1 is killed. Rank 2 notices it first, writes a note and ends. Then rank 0 reads the notes."""
    stood = {
        0: Note(9, 40, "a"),
        1: Note(3, 38, "step 4: reading data"),
        2: Note(8, 40, "step 4: summing", gave_up=True),
    }
    message = missing(stood, stood | {0: Note(11, 40, "a", gave_up=True)})
    assert message == "rank 1 is dead or stopped, last at 'step 4: reading data'"
    alone = {rank: note for rank, note in stood.items() if rank != 1}  # here rank 2 fails by itself
    assert missing(alone, alone | {0: Note(11, 40, "a", gave_up=True)}) == "rank 2 gave up first, at 'step 4: summing'"


def gives_up(mesh: Mesh) -> bool:
    mesh.barrier()
    if mesh.rank == 1:
        with pytest.raises(RankLost):
            mesh.wait(FAILS)
    mesh.barrier()
    return read_notes(mesh._store, 2)[1].gave_up


def test_a_rank_says_that_it_gives_up_before_it_ends(two_ranks: Ranks) -> None:
    assert two_ranks.run(gives_up) == [True, True]


@pytest.mark.usefixtures("two_ranks_of_an_agent")
def test_an_error_of_all_ranks_is_printed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for there in ("True", "False"):
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", there)
        for rank, sentence in ((1, "seed: got 1"), (0, "seed: got 1"), (0, "out: got x")):
            monkeypatch.setenv("RANK", str(rank))
            complain(ValueError(sentence))
        said = ["tilegrad: seed: got 1", "tilegrad: out: got x"]
        assert capsys.readouterr().err.splitlines() == (said if there == "True" else [said[0], *said])


def test_missing_ranks_are_named_when_all_wait_or_many_are_gone() -> None:
    before = {rank: Note(1, 5, "a") for rank in range(20)}
    after = {rank: Note(2, 5, "a") for rank in range(20)}
    assert "every rank is alive" in missing(before, after)
    assert missing(before, before).endswith("; and 12 more")


def test_without_torchrun_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    mesh, x = Mesh(), torch.ones(3)
    with mesh.watch():
        assert (mesh.rank, mesh.world, mesh.all_reduce(x), mesh.gather(4)) == (0, 1, None, [4])
        assert mesh.first(lambda: 5) == 5
        mesh.wait(None)
        mesh.barrier()
    assert not torch.distributed.is_initialized() and torch.equal(x, torch.ones(3))
    mesh.close()


class _Clock:
    """The module `time` as `mesh` uses it: time passes only in sleep()."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_the_watch_ends_a_rank_that_hangs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank that stays at one place for longer than its collectives may wait is ended, unless alone=True."""
    clock, ended, distributed = _Clock(), threading.Event(), cast(Any, torch.distributed)
    monkeypatch.setattr("tilegrad.engine.dist.mesh.time", clock)
    mesh = Mesh(timeout_s=600)
    mesh.world, mesh._store = 2, distributed.HashStore()
    write_note(mesh._store, 1, Note(1, 4, "step 7: reading data"))

    def end(code: int) -> None:
        clock.now = math.inf if code == HUNG else clock.now
        ended.set()

    monkeypatch.setattr("tilegrad.engine.dist.mesh.os._exit", end)
    monkeypatch.setattr("tilegrad.engine.dist.mesh.BEAT_S", 0.01)
    for alone, waited in ((True, 1e6), (False, 600), (False, 1e6)):  # after 600 s the collective raises by itself
        mesh.at("step 7: agreeing on the norm", alone=alone)
        clock.sleep(waited)
        hangs = not alone and waited > 600
        with mesh.watch():
            assert ended.wait(10 if hangs else 0.2) is hangs
    assert clock.now == math.inf
    message = capsys.readouterr().err
    assert message.startswith("tilegrad: rank 0 has been at 'step 7: agreeing on the norm' for 1000000 s: ")
    assert "rank 1 is dead or stopped, last at 'step 7: reading data'" in message


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "3"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"^device: got cuda with 3 ranks on this node; accepted: at most 2"):
        Mesh("cuda")
