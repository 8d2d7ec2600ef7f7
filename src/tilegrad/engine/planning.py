"""The memory plan of a step: forward, backward and update, traced on handles. Nothing is allocated."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from ..kernels import gpu
from ..kernels.op import observe
from ..memory.planned.arena import MemoryPlan, plan_memory
from ..memory.planned.report import MemoryReport, memory_report
from ..memory.planned.trace import Trace, trace
from .optimizer import in_arena_order
from .parallel.check import check_ranks
from .parallel.declare import declare_optimizer, in_units
from .spec import StepSpec


def plan_model(spec: StepSpec, *, share: bool = True) -> MemoryPlan:
    """The plan of all memory that one rank needs. Traces both ways to compute gradients (`step`, and `forward` followed by
    `backward`), so that one plan serves both. share=False gives every buffer memory of its own."""
    check_ranks(spec)
    return plan_memory(_trace(spec, one_step=False), share=share)


def step_report(memory: MemoryPlan, spec: StepSpec, title: str) -> MemoryReport:
    """The buffers that are live during one step, in the arenas of the whole plan."""
    report = memory_report(replace(memory, trace=_trace(spec, one_step=True)), title)
    return replace(report, unplanned=tuple(unplanned_bytes(spec).items()))


def _trace(spec: StepSpec, *, one_step: bool) -> Trace:
    model = spec.declare()
    optimizer, units = declare_optimizer(model, spec)
    step, forward, backward = (in_units(units, model, run) for run in (model.step, model.forward, model.backward))

    def program() -> None:
        step()
        optimizer.update(0.0)
        if one_step:
            return
        forward()
        backward()
        if spec.shares_gradients:  # the gradients of `backward` must stay alive until the update
            optimizer.update(0.0)
        if model.scales:  # trace evaluation too, because it does not round to float8
            evaluation = replace(spec, linear="plain", head="plain").declare()
            in_units(units, evaluation, evaluation.forward)()

    # Persistent buffers, in the order of their arenas. With shard="all", the whole parameters that ops read (p.value) exist
    # only around the ops of their unit, so they are not persistent.
    copies = [p.value for p in in_arena_order(model.params.values(), spec.muon)] if units is None else []
    jumps = [] if model.jumps is None else [model.jumps]
    return trace(program, observe, (optimizer, copies, model.scales, jumps))


def unplanned_bytes(spec: StepSpec) -> dict[str, int]:
    """Bytes on a GPU outside the arenas. The plan and these bytes add up to `torch.cuda.max_memory_allocated` of a step."""
    if spec.device.type != "cuda":
        return {}
    staged = 17 * spec.batch_size * spec.seq_len
    if spec.documents:
        staged += 8 * spec.batch_size * spec.seq_len + 8 * ((spec.batch_size * spec.documents + 2) // 2)
    return {"cuBLAS's workspace": _cublas_workspace(spec.device), "the batch as it is staged": staged}


def _cublas_workspace(device: torch.device) -> int:
    """Bytes of torch's workspace for one stream: CUBLAS_WORKSPACE_CONFIG (:KiB:count…), or 32 MiB on Hopper, else 8.125 MiB."""
    setting = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    if setting:
        numbers = [int(x) for x in setting.strip(":").split(":") if x.isdigit()]
        return sum(size * count for size, count in zip(numbers[::2], numbers[1::2], strict=False)) * 1024
    hopper = not torch.cuda.is_available() or gpu.capability(device)[0] == 9
    return (4096 * 8 if hopper else 4096 * 2 + 16 * 8) * 1024
