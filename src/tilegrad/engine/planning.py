"""A model's memory plan: forward, backward and the optimizer's step, traced on handles. Nothing is allocated."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, cast

import torch

from ..dist.units import Units
from ..kernels import gpu
from ..kernels.attention.context import Ranks, RanksToBe
from ..kernels.op import observe
from ..memory.planned.arena import MemoryPlan, plan_memory
from ..memory.planned.report import MemoryReport, memory_report
from ..memory.planned.trace import trace
from ..model.block import Recomputed
from ..model.config import ModelConfig
from ..model.layer import Linear
from ..model.transformer import Transformer, declare
from .optimizer import Optimizer, decayed_first
from .parallel import BUCKET_BYTES, Shard, check_ranks, in_units, optimizer_of

Recompute = tuple[frozenset[Recomputed], ...]


def plan_model(
    config: ModelConfig, batch_size: int, seq_len: int, dtype: torch.dtype, device: torch.device,
    recompute: Recompute = (), *, linear: Linear = "plain", deterministic: bool = True, share: bool = True,
    world: int = 1, shard: Shard = "optimizer", bucket_bytes: int = BUCKET_BYTES, context: int = 1,
) -> MemoryPlan:  # fmt: skip
    """Every byte of training this model, of one rank of `world`, of which `context` share a sequence. Both ways to its
    gradients are traced, so the plan serves either."""
    check_ranks(config, seq_len, linear, world=world, shard=shard, context=context)
    rows = seq_len // context
    given: Any = {"deterministic": deterministic, "context": _group(context)}
    model = declare(config, batch_size, rows, dtype, device, recompute, linear=linear, **given)
    optimizer, units = optimizer_of(model, world=world, shard=shard, bucket_bytes=bucket_bytes)
    step, forward, backward = (in_units(units, model, run) for run in (model.step, model.forward, model.backward))

    def program() -> None:
        step()
        optimizer.update(0.0)
        forward()
        backward()
        if linear != "plain":  # evaluation is
            declare(config, batch_size, rows, dtype, device, recompute, **given).forward()

    return plan_memory(trace(program, observe, _persistent(optimizer, model, units)), share=share)


def step_report(
    memory: MemoryPlan, config: ModelConfig, batch_size: int, seq_len: int, dtype: torch.dtype,
    recompute: Recompute, title: str, *, linear: Linear = "plain", deterministic: bool = True,
    world: int = 1, shard: Shard = "optimizer", bucket_bytes: int = BUCKET_BYTES, context: int = 1,
) -> MemoryReport:  # fmt: skip
    """What is alive during one step, in the arenas of the whole plan."""
    model = declare(
        config, batch_size, seq_len // context, dtype, memory.device, recompute,
        linear=linear, deterministic=deterministic, context=_group(context),
    )  # fmt: skip
    optimizer, units = optimizer_of(model, world=world, shard=shard, bucket_bytes=bucket_bytes)
    step = in_units(units, model, model.step)

    def program() -> None:
        step()
        optimizer.update(0.0)

    one_step = replace(memory, trace=trace(program, observe, _persistent(optimizer, model, units)))
    return replace(memory_report(one_step, title), beside=tuple(beside(memory.device, batch_size, seq_len).items()))


def _group(context: int) -> Ranks | None:
    """Of ranks that share a sequence and need not be there: what is traced does not run."""
    return cast(Ranks, RanksToBe(context)) if context > 1 else None


def beside(device: torch.device, batch_size: int, seq_len: int) -> dict[str, int]:
    """Bytes on a GPU that are no arena's: with them the plan is what `torch.cuda.max_memory_allocated` says of a step."""
    if device.type != "cuda":
        return {}
    n = batch_size * seq_len
    return {"cuBLAS's workspace": _cublas_workspace(device), "the batch as it is staged": 17 * n}


def _cublas_workspace(device: torch.device) -> int:
    """torch's, of one stream: 32 MiB on Hopper, else 8 1/8, or what CUBLAS_WORKSPACE_CONFIG says (:KiB:count…)."""
    given = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    if given:
        numbers = [int(x) for x in given.strip(":").split(":") if x.isdigit()]
        return sum(size * count for size, count in zip(numbers[::2], numbers[1::2], strict=False)) * 1024
    hopper = not torch.cuda.is_available() or gpu.capability(device)[0] == 9
    return (4096 * 8 if hopper else 4096 * 2 + 16 * 8) * 1024


def _persistent(optimizer: Optimizer, model: Transformer, units: Units | None) -> object:
    """Buffers that live as long as the engine, in the order of their arenas: the optimizer's flat ranges, then the compute
    copies of the params, but for those in units, and the scales of float8 products, where there are any."""
    copies = [p.value for p in decayed_first(model.params.values())] if units is None else []
    return optimizer, copies, model.scales
