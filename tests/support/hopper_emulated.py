"""Hopper's forward in the Gluon emulator, which runs the launches of a call in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from support.cases import Call
from support.gluon.emulator import in_python
from support.kernels import run_forward
from tilegrad.kernels.attention.problem import output_shapes
from tilegrad.kernels.attention.triton.fit import KernelCall


def forward(
    call: Call, programs: int, broken: Callable[[pytest.MonkeyPatch], None] = lambda _patch: None
) -> dict[str, torch.Tensor]:
    """Computes o and lse in plain Python. `broken` replaces device functions."""
    from tilegrad.kernels.attention import hopper
    from tilegrad.kernels.attention.hopper import (
        edges,
        forward_load,
        forward_scheduler,
        launch_forward,
        pieces,
        pipeline,
        registers,
    )
    from tilegrad.kernels.attention.hopper import forward as forward_kernel
    from tilegrad.kernels.attention.triton import intervals, memory, numerics, scores

    q, k, v, mask = call.q, call.k, call.v, call.mask
    o_shape, lse_shape = output_shapes(q, v, mask)
    out = {"o": q.new_full(o_shape, math.nan), "lse": q.new_full(lse_shape, math.nan, dtype=torch.float32)}
    modules = (
        forward_kernel, edges, forward_load, forward_scheduler, pieces, pipeline, registers, intervals, memory, numerics,
        scores,
    )  # fmt: skip
    with in_python(*modules) as launch, pytest.MonkeyPatch.context() as patch:  # the patches are undone first
        broken(patch)
        patch.setattr(launch_forward, "multiprocessors", lambda _device: programs)
        run_in_python(patch, launch_forward, launch)
        needed = hopper.workspace(q, k, v, mask, backward=False, deterministic=False)
        scratch = {name: torch.full(shape, 7, dtype=dtype) for name, (shape, dtype) in needed.items()}
        run_forward(hopper, q, k, v, mask, **out, scratch=scratch)
    return out


def run_in_python(patch: pytest.MonkeyPatch, host: Any, launch: Callable[..., None]) -> None:
    """Launches of a host module become calls of `launch`, and its launch plans run them one after the other."""

    def prepare(kernel: Any, _key: Any, grid: int, arguments: Any, **_warps: int) -> Any:
        return Started(lambda: launch(kernel, grid, arguments))

    def start(call: KernelCall, _device: int) -> Started:
        return Started(
            lambda: launch(call.kernel, call.programs[0], tuple(map(call.arguments.get, call.kernel.arg_names)))
        )

    patch.setattr(host, "prepare", prepare)
    patch.setattr(KernelCall, "launch", start)
    patch.setattr(host, "Plan", lambda launches, *_: lambda _call: [each.start() for each in launches])
    patch.setattr(host, "Zero", lambda x: Started(x.zero_), raising=False)


class Started(NamedTuple):
    start: Callable[[], object]
    device: int = 0
