"""The optimizer and the schedule of one rank, with handles instead of tensors, for the memory plan and for the strategies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...kernels.muon import MuonConfig
from ...kernels.op import emitter, observe, observe_names
from ...memory.planned.trace import handles
from ...model.transformer import Transformer
from ..dist.mesh import Mesh
from ..dist.schedule import Bucket, Touch, cut, touches
from ..dist.units import UnitParam, Units
from ..optimizer import AdamW, Optimizer, in_arena_order
from ..spec import StepSpec


def schedule_of(model: Transformer, program: Callable[[], object] | None = None) -> tuple[Touch, ...]:
    """The parameters that each op of `program` reads, and the gradients that it writes. program=None: the step of the model."""
    values = {handle.name: name for name, p in model.params.items() for handle in handles(p.value)}
    grads = {handle.name: name for name, p in model.params.items() for handle in handles(p.kept_grad)}
    return touches(program or model.step, observe, values, grads)


def buckets_of(
    model: Transformer, steps: Sequence[Touch], world: int, bucket_bytes: int, muon: MuonConfig | None = None
) -> tuple[Bucket, ...]:
    masters = list(handles([p.master for p in in_arena_order(model.trained, muon)]))
    unsplit = {p.name for p in model.trained if p.matrices} if muon is not None else ()
    return cut(masters, steps, world, bucket_bytes, unsplit)


def declare_optimizer(
    model: Transformer, spec: StepSpec, adamw: AdamW | None = None, rank: int = 0
) -> tuple[Optimizer, Units | None]:
    """The optimizer of one rank, and the units if parameters are sharded, otherwise None."""
    params, units = model.trained, None
    buckets: tuple[Bucket, ...] = ()
    if spec.in_units:
        unit_params = [UnitParam(p.name, *handles((p.value, p.grad, p.master))) for p in params]
        units = Units.declare(unit_params, spec.world, torch.bfloat16 if spec.states.gradients == "bfloat16" else None)
    elif spec.world > 1 and spec.shard == "optimizer":
        buckets = buckets_of(model, schedule_of(model), spec.world, spec.bucket_bytes, spec.muon)
    optimizer = Optimizer.declare(
        params,
        adamw,
        spec.muon,
        spec.ema,
        rank=rank,
        world=spec.world,
        buckets=buckets,
        units=units,
        states=spec.states,
        scales=len(model.scales),
    )
    return optimizer, units


def in_units(units: Units | None, model: Transformer, program: Callable[[], None]) -> Callable[[], None]:
    """`program` with the collectives of `units` between its ops; unchanged if units is None."""
    if units is None:
        return program
    steps, mesh = schedule_of(model, program), Mesh(alone=True)

    def run() -> None:
        with units.around(steps, mesh, first=False, emit=emitter(), observe=observe, observe_names=observe_names):
            program()

    return run
