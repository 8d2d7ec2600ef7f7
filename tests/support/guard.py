"""Ops run inside larger buffers: what an op writes lies in the midst of a pattern, and the pattern must stay."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tilegrad.kernels.op import Call

BESIDE = 13  # elements before and after: no alignment is left
PATTERN = 0xA5


class Guard:
    """An observer of ops. `calls` counts those that ran; one that writes beside its tensors raises by name."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, call: Call) -> None:
        run = call.run
        assert isinstance(run, functools.partial)
        moved: list[tuple[str, Tensor, Tensor, Tensor]] = []
        keywords = {name: self._moved(name, value, moved) for name, value in run.keywords.items()}
        run.func(*run.args, **keywords)
        for name, original, view, memory in moved:
            original.copy_(view)
            seen = _bytes(memory)
            inside = _inside(view, memory)
            assert bool((seen[~inside] == PATTERN).all()), f"{call.name} writes beside {name}"
        self.calls += 1

    def _moved(self, name: str, value: Any, moved: list[tuple[str, Tensor, Tensor, Tensor]]) -> Any:
        if isinstance(value, dict):
            return {key: self._moved(f"{name}[{key}]", x, moved) for key, x in value.items()}
        if not isinstance(value, Tensor) or not value.numel():
            return value
        extent = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        memory = torch.empty(extent + 2 * BESIDE, dtype=value.dtype)
        _bytes(memory).fill_(PATTERN)
        view = memory.as_strided(value.shape, value.stride(), BESIDE)
        view.copy_(value)
        moved.append((name, value, view, memory))
        return view


def _bytes(memory: Tensor) -> Tensor:
    return memory.view(torch.uint8).view(-1, memory.dtype.itemsize)


def _inside(view: Tensor, memory: Tensor) -> Tensor:
    inside = torch.zeros(memory.shape, dtype=torch.bool)
    inside.as_strided(view.shape, view.stride(), view.storage_offset())[...] = True
    return inside
