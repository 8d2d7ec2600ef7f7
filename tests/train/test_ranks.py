"""An engine over ranks against one process: losses, norms, parameters, memory, guards; and its schedule, without ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import CONFIG, LLAMA, equal
from support.ranks import Ranks
from torch import Tensor

from tilegrad import Engine
from tilegrad.dist.mesh import Mesh
from tilegrad.kernels.op import observe
from tilegrad.memory.planned.arena import poison_dead
from tilegrad.train.checkpoint import DamagedCheckpoint, load_into, save_checkpoint
from tilegrad.train.pieces import load_pieces, save_pieces

CASES = {
    "tied, dropout": replace(CONFIG, vocab_size=97, n_embd=32, dropout=0.1),
    "untied, GQA, window": replace(LLAMA, vocab_size=89, n_embd=32, n_layer=2, window=7),
}
F64: Any = {"dtype": torch.float64, "seed": 3, "eps": 1e-6}  # AdamW turns noise below eps into rate · noise / eps
Batch = tuple[Tensor, Tensor]


def micro_batches(vocab: int, step: int, count: int) -> list[Batch]:
    """Of unequal sizes; some positions have no target."""
    g = torch.Generator().manual_seed(step)
    out = []
    for i in range(count):
        b, t = 1 + i % 3, 16 - i % 5
        x, y = torch.randint(0, vocab, (2, b, t), generator=g)
        y[torch.rand(b, t, generator=g) < 0.2] = -1
        out.append((x, y))
    return out


def mine(mesh: Mesh, pairs: list[Batch]) -> tuple[list[Tensor], list[Tensor]]:
    dealt = pairs[mesh.rank :: mesh.world]
    return [x for x, _ in dealt], [y for _, y in dealt]


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[n] - b[n]).abs().max() / b[n].abs().max().clamp_min(1e-30)) for n in b)


def parity(mesh: Mesh, case: str, shard: str, count: int) -> tuple[float, int, int, int]:
    """The worst relative distance after five steps, and bytes."""
    config = CASES[case]
    one = Engine(config, 3, 16, **F64)
    many = Engine(config, 3, 16, **F64, mesh=mesh, shard=shard, bucket_bytes=20_000)  # type: ignore[arg-type]
    assert apart(many.params, one.params) == 0.0
    worst = 0.0
    for step in range(5):
        pairs = micro_batches(config.vocab_size, step, count)
        loss = one.step([x for x, _ in pairs], [y for _, y in pairs], 1e-2)
        many.submit(*mine(mesh, pairs), 1e-2)
        (result,) = many.finished(wait=True)
        worst = max(worst, abs(result.loss / loss - 1), abs(result.norm / float(one.optimizer.norm) - 1))
    assert many.draws == one.draws and many.steps == one.steps == 5
    return max(worst, apart(many.params, one.params)), many.arenas.nbytes, many.plan.peak_bytes, one.plan.peak_bytes


@pytest.mark.parametrize(
    ("case", "shard", "count"),
    [
        ("tied, dropout", "optimizer", 3),
        ("tied, dropout", "none", 4),
        ("untied, GQA, window", "optimizer", 1),
        ("untied, GQA, window", "none", 1),
        ("tied, dropout", "all", 3),
        ("untied, GQA, window", "all", 1),
    ],
)
def test_ranks_are_one_process(two_ranks: Ranks, case: str, shard: str, count: int) -> None:
    """Ranks with unequal micro-batches, and with none."""
    for worst, allocated, planned, alone in two_ranks.run(parity, case, shard, count):
        assert worst < 1e-12
        assert allocated == planned and (planned < alone) == (shard != "none")


def trained(mesh: Mesh | None, steps: int, shard: str = "optimizer", bucket_bytes: int = 20_000) -> Engine:
    config = CASES["tied, dropout"]
    engine = Engine(config, 3, 16, seed=3, mesh=mesh, shard=shard, bucket_bytes=bucket_bytes)  # type: ignore[arg-type]
    go_on(engine, mesh, steps)
    return engine


def go_on(engine: Engine, mesh: Mesh | None, until: int) -> Engine:
    while engine.steps < until:
        pairs = micro_batches(97, engine.steps, 3)
        x, y = ([x for x, _ in pairs], [y for _, y in pairs]) if mesh is None else mine(mesh, pairs)
        engine.step(x, y, 1e-2)
    return engine


def saved_and_resumed(mesh: Mesh, folder: str) -> str:
    """Resumed on the same ranks and buckets: the same bits. On others: the same parameters."""
    engine = trained(mesh, 3)
    path = save_pieces(Path(folder), engine, mesh, {"engine": engine.state()})
    at_3 = {name: p.clone() for name, p in engine.params.items()}
    at_5 = {name: p.clone() for name, p in go_on(engine, mesh, 5).params.items()}
    again = trained(mesh, 0)
    again.restore(load_pieces(path, again, mesh)["engine"])
    assert equal(again.params, at_3) and again.steps == 3
    assert equal(go_on(again, mesh, 5).params, at_5)
    for shard, bucket_bytes in (("none", 50_000), ("all", 1), ("optimizer", 9_000)):
        other = trained(mesh, 1, shard, bucket_bytes)
        other.restore(load_pieces(path, other, mesh)["engine"])
        assert equal(other.params, at_3)
        again_path = save_pieces(Path(folder), other, mesh, {"engine": other.state()})
    return str(again_path)


def loaded_from_one(mesh: Mesh, path: str, shard: str) -> dict[str, Tensor]:
    engine = trained(mesh, 0, shard)
    engine.restore(load_pieces(Path(path), engine, mesh)["engine"])
    return {name: p.clone() for name, p in go_on(engine, mesh, 4).params.items()}


def test_checkpoints_of_two_ranks_are_read_by_one_and_by_two(two_ranks: Ranks, tmp_path: Path) -> None:
    paths = set(two_ranks.run(saved_and_resumed, str(tmp_path / "two")))
    assert len(paths) == 1
    one = trained(None, 0)
    state = load_into(Path(paths.pop()), one.tensors()).state
    one.restore(state["engine"])
    assert one.steps == 3 and state["ranks"] == 2
    path = save_checkpoint(tmp_path / "one", 3, one.tensors(), {"engine": one.state()})
    after = two_ranks.run(loaded_from_one, str(path), "optimizer") + two_ranks.run(loaded_from_one, str(path), "none")
    go_on(one, None, 4)
    for params in after:
        assert apart(params, one.params) < 1e-4


def damaged(mesh: Mesh, folder: str) -> tuple[str, str]:
    engine = trained(mesh, 1)
    good = save_pieces(Path(folder), engine, mesh, {"engine": engine.state()})
    path = save_pieces(Path(folder), go_on(engine, mesh, 2), mesh, {"engine": engine.state()})
    before = {name: p.clone() for name, p in engine.params.items()}
    if mesh.rank == 0:
        victim = sorted(path.glob("*.safetensors"))[-1]
        data = bytearray(victim.read_bytes())
        data[-5] ^= 1
        victim.write_bytes(data)
    mesh.barrier()
    with pytest.raises(DamagedCheckpoint) as error:
        load_pieces(path, engine, mesh)
    assert error.value.previous == good and equal(engine.params, before)
    with pytest.raises(ValueError, match=r"got .* of shape .*; accepted: .*, this model's") as other:
        load_pieces(good, Engine(CASES["untied, GQA, window"], 3, 16, mesh=mesh), mesh)
    return str(error.value), str(other.value)


def test_a_damaged_shard_and_another_model_are_refused_on_all_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    for told, _ in two_ranks.run(damaged, str(tmp_path)):
        assert "shard-00002" in told and "000001-step-1" in told


def guarded(mesh: Mesh) -> None:
    """A gradient that is not finite on one rank is skipped by all, and a stop asked of one is heard by all."""
    many = trained(mesh, 1)
    before = {name: p.clone() for name, p in many.params.items()}
    many.zero_gradients()
    many.forward(*micro_batches(97, 7, 2)[mesh.rank])
    many.backward()
    if mesh.rank == 1:
        many.ask_to_stop()
        many.grads["blocks.1.ffn.up.weight"][3, 3] = math.inf
    norm = many.optimizer_step(1e-2)
    assert (math.isfinite(norm), many.optimizer.skipped, many.stop) == (False, 1, True)
    assert equal(many.params, before)
    many.gradients(*mine(mesh, micro_batches(97, 8, 2)))
    many.forward(*micro_batches(97, 8, 1)[0])
    with pytest.raises(RuntimeError, match=r"^backward: got gradients that are summed over the ranks already"):
        many.backward()
    many.zero_gradients()
    many.backward()


def test_a_guard_and_a_stop_are_agreed(two_ranks: Ranks) -> None:
    two_ranks.run(guarded)


def poisoned(mesh: Mesh) -> None:
    """Units whose values are spoiled after their last use, as every dead value: no bit of a gradient changes."""
    engine = trained(mesh, 1, "all")
    x, y = micro_batches(97, 5, 2)[mesh.rank]

    def program() -> list[Tensor]:
        engine.draws = 7
        engine.gradients(x, y)
        found = [own.grads.clone() for own in engine.optimizer.owned]
        engine.optimizer_step(0.0)
        engine.zero_gradients()
        engine.forward(x, y, 100)
        engine.backward()
        return found + [own.grads.clone() for own in engine.optimizer.owned]

    want = program()
    engine.arenas.poison()
    with poison_dead(engine.arenas, observe):
        got = program()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_units_are_dead_when_the_plan_says_so(two_ranks: Ranks) -> None:
    two_ranks.run(poisoned)


def evaluated(mesh: Mesh) -> float:
    """A forward of its own gathers units too, and a rank without a micro-batch takes part."""
    one, many = trained(None, 0), trained(mesh, 0, "all")
    x, y = micro_batches(97, 5, 1)[0]
    assert many.evaluate(x, y) == pytest.approx(one.evaluate(x, y), abs=1e-6)
    return many.step(*mine(mesh, [(x, y)]), 1e-2) - one.step(x, y, 1e-2)


def test_evaluation_and_empty_ranks_of_units(two_ranks: Ranks) -> None:
    assert two_ranks.run(evaluated) == pytest.approx([0.0, 0.0], abs=1e-6)


def disagreeing(mesh: Mesh) -> list[str]:
    told = []
    for options in (
        {"seed": mesh.rank},
        {"weight_decay": 0.1 * mesh.rank},
        {"bucket_bytes": 9_000 + 20_000 * mesh.rank},
    ):
        with pytest.raises(ValueError, match=r" on rank 1; accepted: rank 0's") as error:
            Engine(CASES["tied, dropout"], 3, 16, mesh=mesh, **options)
        told.append(str(error.value).split(":")[0])
    return told


def test_ranks_that_disagree_are_refused_with_the_field(two_ranks: Ranks) -> None:
    assert two_ranks.run(disagreeing) == [["seed", "optimizer", "buckets"]] * 2
