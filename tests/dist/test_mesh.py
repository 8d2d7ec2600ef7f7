"""The ranks of a run: collectives on slices of one buffer, who is missing, what rank 0 does first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import Ranks

from tilegrad.dist.mesh import Mesh, Note, RankLost, missing, read_notes, write_note


def collectives(mesh: Mesh) -> list[list[float]]:
    """Each in place on a slice of one buffer; waited for at once, and later."""
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
    return [*found, [float(told["rank"]) for told in mesh.gather({"rank": mesh.rank})]]


def test_collectives_in_place(two_ranks: Ranks) -> None:
    whole = [3.0 * i for i in range(8)]
    for rank, found in enumerate(two_ranks.run(collectives)):
        summed = [i * (rank + 1.0) if i not in (2, 3) else 3.0 * i for i in range(8)]
        assert found == [whole[4 * rank : 4 * rank + 4], whole, summed] * 2 + [[0.0, 1.0]]


def firsts(mesh: Mesh, folder: str) -> tuple[list[str], str]:
    """Rank 0 writes while the other waits; then it fails, and the other with it."""
    file = Path(folder) / "order"

    def work() -> list[str]:
        seen = file.read_text().split() if file.exists() else []
        file.write_text(" ".join([*seen, str(mesh.rank)]))
        return seen

    def fail() -> None:
        raise KeyError("nothing here")

    found = mesh.first(work)
    with pytest.raises((KeyError, RankLost)) as error:
        mesh.first(fail)
    return found, str(error.value)


def test_rank_0_first(two_ranks: Ranks, tmp_path: Path) -> None:
    (seen0, error0), (seen1, error1) = two_ranks.run(firsts, str(tmp_path))
    assert (seen0, seen1) == ([], ["0"])
    assert "nothing here" in error0 and "rank 0 failed" in error1


def lost(mesh: Mesh) -> str:
    """A collective that fails says who is missing: nobody here, but the place is named."""
    mesh.at("step 3: summing")
    with pytest.raises(RankLost) as error:
        mesh.wait(_Fails())
    return str(error.value)


class _Fails:
    def wait(self) -> None:
        raise RuntimeError("Connection closed by peer")


def test_a_failed_collective_names_the_place(two_ranks: Ranks) -> None:
    for rank, told in enumerate(two_ranks.run(lost)):
        assert told.startswith(f"rank {rank}, wait at 'step 3: summing': every rank is alive")


def test_missing_by_notes() -> None:
    distributed: Any = torch.distributed  # whose types leave HashStore out
    store = distributed.HashStore()
    for rank, note in enumerate([Note(7, 40, "step 4: summing"), Note(7, 38, "step 4: reading data"), Note(3, 38, "x")]):
        write_note(store, rank, note)
    before = read_notes(store, 4)
    for rank, note in enumerate([Note(9, 40, "step 4: summing"), Note(9, 38, "step 4: reading data")]):
        write_note(store, rank, note)
    told = missing(before, read_notes(store, 4))
    assert told == (
        "rank 2 is dead or stopped, last at 'x'; rank 3 is dead or stopped, last at 'nowhere yet'; "
        "rank 1 is behind, at 'step 4: reading data'"
    )


def test_missing_when_all_wait_or_many_are_gone() -> None:
    before = {rank: Note(1, 5, "a") for rank in range(20)}
    after = {rank: Note(2, 5, "a") for rank in range(20)}
    assert "every rank is alive" in missing(before, after)
    assert missing(before, before).endswith("; and 12 more")


def test_one_rank_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "3"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"^device: got cuda with 3 ranks on this node; accepted: at most 2"):
        Mesh("cuda")
