"""A model whose sequences are split over ranks: its loss and gradients, summed over ranks, equal those of one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.models import LLAMA, QWEN3, SPEED_RUN, assert_equal_gradients, batch
from support.threads import run_on_threads
from torch import Tensor

from tilegrad import ModelConfig
from tilegrad.kernels.attention.context import Ranks, RanksToBe, positions_of
from tilegrad.kernels.op import observe
from tilegrad.memory.planned.arena import Arenas, MemoryPlan, plan_memory, poison_dead
from tilegrad.memory.planned.trace import bind, trace
from tilegrad.memory.types import BufferType
from tilegrad.model.layer import Declare
from tilegrad.model.transformer import Transformer, declare

CPU = torch.device("cpu")
B, T = 2, 16
CONFIGS = {
    "llama": replace(LLAMA, n_layer=2),
    "window, GELU, biases, tied": replace(
        LLAMA, n_layer=2, window=5, activation="gelu", norm="layernorm", bias=True, tie_embeddings=True
    ),
    "q and k normed, a window in one block": QWEN3,
    "speed run": replace(SPEED_RUN, position="rope"),
}


def rows_of(x: Tensor, group: Ranks) -> Tensor:
    return torch.cat([x[:, i] for i in positions_of(group.rank, group.world, x.shape[1] // group.world)], 1)


def planned(config: ModelConfig, context: Any, b: int = B, t: int = T) -> tuple[Transformer, MemoryPlan]:
    """A planned model for sequences of t tokens."""
    rows = t if context is None else t // context.world
    model = declare(Declare(config, b, rows, torch.float64, CPU, accumulate=False, context=context))
    return model, plan_memory(trace(model.step, observe, model))


def step(
    config: ModelConfig, context: Ranks | None, t: int = T, *, poison: bool = False
) -> tuple[float, dict[str, Tensor]]:
    """The loss and gradients of this rank's rows."""
    handles, plan = planned(config, context)
    arenas = Arenas(plan)
    bind(handles, arenas.view).initialise(config, torch.Generator().manual_seed(3))
    rows = t if context is None else t // context.world
    model = bind(declare(Declare(config, B, rows, torch.float64, CPU, accumulate=False, context=context)), arenas.view)
    tokens, targets = batch(config, B, t)
    model.head.inv_total.fill_(1.0 / int((targets >= 0).sum()))
    if context is not None:
        tokens, targets = rows_of(tokens, context), rows_of(targets, context)
    model.tokens.copy_(tokens)
    model.head.targets.view(B, rows).copy_(targets)
    if poison:
        with poison_dead(arenas, observe):
            model.step()
    else:
        model.step()
    return float(model.head.loss), {name: p.grad.clone() for name, p in model.params.items() if p.grad is not None}


def summed(parts: list[tuple[float, dict[str, Tensor]]]) -> tuple[float, dict[str, Tensor]]:
    names = parts[0][1]
    return sum(loss for loss, _ in parts), {name: sum((g[name] for _, g in parts[1:]), names[name]) for name in names}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_of_ranks_add_up_to_those_of_one(name: str, world: int) -> None:
    loss, grads = step(CONFIGS[name], None)
    got, sums = summed(run_on_threads(world, lambda group: step(CONFIGS[name], group)))
    assert got == pytest.approx(loss, rel=1e-12)
    assert_equal_gradients(sums, grads, 1e-12)


def test_a_shorter_sequence_has_its_own_positions() -> None:
    loss, grads = step(CONFIGS["llama"], None, 8)
    got, sums = summed(run_on_threads(2, lambda group: step(CONFIGS["llama"], group, 8)))
    assert got == pytest.approx(loss, rel=1e-12)
    assert_equal_gradients(sums, grads, 1e-12)


def test_poison_changes_no_bit() -> None:
    for (loss, grads), (poisoned_loss, poisoned_grads) in zip(
        run_on_threads(2, lambda group: step(CONFIGS["llama"], group)),
        run_on_threads(2, lambda group: step(CONFIGS["llama"], group, poison=True)),
        strict=True,
    ):
        assert loss == poisoned_loss
        assert all(torch.equal(grad, poisoned_grads[name]) for name, grad in grads.items())


def test_gathered_buffers_live_for_one_op() -> None:
    """K and V of the whole sequence and their gradients are COMM buffers with one range for each block and direction."""
    config = CONFIGS["llama"]
    _, plan = planned(config, RanksToBe(4))
    seen = plan.trace
    comm = {h.name: h.nbytes for h in seen.handles.values() if h.type == BufferType.COMM}
    whole = B * config.kv_heads * T * config.head_dim * 8  # bytes of K
    assert comm["scratch.attention.k"] == comm["scratch.attention_bwd.dk"] == whole
    forward_and_backward, gradients, of_the_first_run = 4 + 4, 4, 1  # for each of k, v and the parts of both
    assert sum(comm.values()) == (forward_and_backward + gradients + of_the_first_run) * whole
    for name in comm:
        assert all(first == last for first, last in seen.live[name])
        assert len(seen.live[name]) == config.n_layer
    _, alone = planned(config, None)
    assert not any(h.type == BufferType.COMM for h in alone.trace.handles.values())


def test_every_rank_has_the_same_plan() -> None:
    first, last = (planned(CONFIGS["llama"], RanksToBe(4, rank))[1] for rank in (0, 3))
    assert first.peak_bytes == last.peak_bytes
    assert {r: a.offsets for r, a in first.arenas.items()} == {r: a.offsets for r, a in last.arenas.items()}
