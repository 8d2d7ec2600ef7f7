"""Observers that run ops on other memory: inside a pattern, which must not change, and on rows with gaps between them."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from tilegrad.kernels.op import Call

BESIDE = 13  # elements before and after, so that no alignment is left
PATTERN = 0xA5


class Guard:
    """An observer of ops. `calls` counts those that ran; one that writes outside its tensors raises an error with its name."""

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
            assert bool((seen[~inside] == PATTERN).all()), f"{call.name} writes outside {name}"
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


class Apart:
    """An observer of ops. Each op runs three more times: with gaps between the rows that it writes, that it reads, and both.
    The results are the same up to rounding, or an error names the strides. `taken` and `refused` count ops by name."""

    def __init__(self) -> None:
        self.taken, self.refused = Counter[str](), Counter[str]()

    def __call__(self, call: Call) -> None:
        run = call.run
        assert isinstance(run, functools.partial)
        results = []
        for reads, writes in ((False, True), (True, False), (True, True)):
            keywords = {name: _copy(x, apart=writes) for name, x in run.keywords.items()}
            try:
                run.func(*(_copy(x, apart=reads) for x in run.args), **keywords)
                results.append(keywords)
            except ValueError as error:
                if "stride" not in str(error) and "contiguous" not in str(error):
                    raise
                self.refused[call.name] += 1
        call.run()
        for keywords in results:
            self.taken[call.name] += 1
            for name, x in run.keywords.items():
                if isinstance(x, Tensor) and name != "scratch":
                    assert _alike(keywords[name], x), (
                        f"{call.name}: {name} is another where rows have gaps between them"
                    )


def _copy(x: Any, *, apart: bool) -> Any:
    """A copy of a tensor, with three elements between its rows if they are to have gaps."""
    if not isinstance(x, Tensor):
        return x
    if not apart or x.ndim < 2:
        return x.clone()
    memory = torch.empty(*x.shape[:-1], x.shape[-1] + 3, dtype=x.dtype)
    return memory[..., : x.shape[-1]].copy_(x)


def _alike(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point() or not a.numel():
        return torch.equal(a, b)
    largest = float(b.abs().nan_to_num(posinf=0.0).max())
    return torch.allclose(a, b, rtol=0.0, atol=(0.02 if b.itemsize < 4 else 1e-5) * largest, equal_nan=True)
