"""An engine over ranks against one process: losses, norms, parameters, memory, guards; and its schedule, without ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.models import CONFIG, LLAMA
from support.ranks import Ranks
from torch import Tensor

from tilegrad import Engine, ModelConfig
from tilegrad.dist.mesh import Mesh

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
    ],
)
def test_ranks_are_one_process(two_ranks: Ranks, case: str, shard: str, count: int) -> None:
    """Ranks with unequal micro-batches, and with none."""
    for worst, allocated, planned, alone in two_ranks.run(parity, case, shard, count):
        assert worst < 1e-12
        assert allocated == planned and (planned < alone) == (shard == "optimizer")
