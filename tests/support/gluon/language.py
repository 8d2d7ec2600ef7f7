"""Replacements of Gluon's `gl` and Triton's `tl`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from support.gluon.schedule import Task, task
from support.gluon.shared_memory import Barriers, NamedBarrier, Shared, SharedLinearLayout
from support.gluon.tma import store_wait
from support.gluon.values import Block, Number, Pointer, block


def _plain(x: Any) -> Any:
    """Makes a 0-dim integer tensor a Number."""
    return Number(x.item()) if x.dim() == 0 and not x.is_floating_point() else block(x)


def _both(function: Callable[..., Tensor], of_numbers: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def both(x: Any, y: Any) -> Any:
        if not isinstance(x, Tensor) and not isinstance(y, Tensor):
            return of_numbers(x, y)
        x, y = (a if isinstance(a, Tensor) else torch.tensor(a, dtype=b.dtype) for a, b in ((x, y), (y, x)))
        return block(function(x, y))

    return both


def _no_layout(*of: Any, **more: Any) -> None:
    return None


class Language(SimpleNamespace):
    """Replaces `gl` and `tl`."""

    float32, float64, int32, int64, constexpr = torch.float32, torch.float64, torch.int32, torch.int64, int
    minimum, maximum = staticmethod(_both(torch.minimum, min)), staticmethod(_both(torch.maximum, max))
    exp2, log2, abs = staticmethod(torch.exp2), staticmethod(torch.log2), staticmethod(torch.abs)
    range = static_range = staticmethod(range)
    zeros_like = staticmethod(torch.zeros_like)
    BlockedLayout = SliceLayout = NVMMADistributedLayout = staticmethod(_no_layout)
    DotOperandLayout = SwizzledSharedLayout = staticmethod(_no_layout)
    SharedLinearLayout = SharedLinearLayout
    NVMMASharedLayout = SimpleNamespace(get_default_for=_no_layout)
    math = SimpleNamespace(exp2=torch.exp2, log2=torch.log2)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        """Rounds twice. Where z is 0 the result is that of a device."""
        return block(torch.as_tensor(x * y + z))

    def program_id(self, axis: int) -> int:
        return task().program.here

    def num_programs(self, axis: int) -> int:
        return task().program.programs

    def num_warps(self) -> int:
        return 4

    def to_tensor(self, x: Any) -> Any:
        return x

    def convert_layout(self, x: Any, layout: None, assert_trivial: bool = False) -> Any:
        return x

    def multiple_of(self, x: Any, n: Any) -> Any:
        return x

    def static_assert(self, condition: bool) -> None:
        assert condition

    def cdiv(self, x: Any, y: Any) -> Any:
        return (x + y - 1) // y

    def cast(self, x: Any, dtype: torch.dtype) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) else x

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        return block(torch.where(condition, x, y)) if isinstance(condition, Tensor) else x if condition else y

    def max(self, x: Tensor, axis: int) -> Any:
        return _plain(x.amax(axis))

    def min(self, x: Tensor, axis: int) -> Any:
        return _plain(x.amin(axis))

    def cumsum(self, x: Tensor, axis: int) -> Block:
        return block(x.cumsum(axis, dtype=x.dtype))

    def sum(self, x: Tensor, axis: int) -> Any:
        return _plain(x.sum(axis))

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, layout: None = None) -> Block:
        return block(torch.zeros(*shape, dtype=dtype))

    def full(self, shape: Sequence[int], value: Any, dtype: torch.dtype, layout: None = None) -> Block:
        return block(torch.full(tuple(shape), value, dtype=dtype))

    def arange(self, start: int, stop: int, layout: None = None) -> Block:
        return block(torch.arange(start, stop, dtype=torch.int32))

    def load(self, at: Pointer, mask: Any = True, other: Any = 0, cache_modifier: str = "") -> Any:
        where, inside = at.places(mask)
        if not len(at.memory):
            return block(torch.full(where.shape, other, dtype=at.memory.dtype))
        return _plain(torch.where(inside, at.memory[torch.where(inside, where, 0)], other))

    def store(self, at: Pointer, value: Any, mask: Any = True) -> None:
        where, inside = at.places(mask)
        at.memory[where[inside]] = torch.as_tensor(value).expand(where.shape)[inside].to(at.memory.dtype)

    def atomic_add(self, at: Pointer, n: Any, sem: str = "") -> Any:
        """With n = 0 it reads a counter: a thread that polls again resumes after another atomic."""
        here, schedule = task(), task().schedule
        looks = isinstance(n, int) and n == 0
        schedule.pause(lambda: not looks or schedule.atomics != here.seen)
        where, _ = at.places(True)
        old = _plain(at.memory[where])
        if looks:
            here.seen = schedule.atomics
        else:
            more = torch.as_tensor(n, dtype=at.memory.dtype).expand(where.shape)
            at.memory.index_put_((where,), more, accumulate=True)
            schedule.atomics += 1
        return old

    def inline_asm_elementwise(self, asm: str, *of: Any, **more: Any) -> None:
        barrier = re.match(r"bar\.(sync|arrive) \$1, (\d+);", asm)
        if barrier:
            NamedBarrier.at(int(of[1][0]), int(barrier[2]), waits=barrier[1] == "sync")
        elif asm.startswith("cp.async.bulk.wait_group 0;"):
            store_wait(0)
            task().schedule.land(task())
        else:
            assert asm.startswith("fence.proxy.async.global;"), asm

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        if layout == "mbarrier":
            return Barriers(shape[0], task().schedule)
        return Shared(torch.full(shape, math.nan if dtype.is_floating_point else 2**31 - 1, dtype=dtype))

    def warp_specialize(self, partitions: list[Any], warps: list[int], registers: list[int]) -> None:
        here = task()
        started = {
            Task(here.schedule, here.program, lambda function=function, of=of: function(*of), n)  # type: ignore[misc]
            for (function, of), n in zip(partitions, (here.threads // 32, *warps), strict=True)
        }
        here.schedule.pause(lambda: started.isdisjoint(here.schedule.tasks))
        assert not any(barrier.arrived for barrier in here.program.named.values()), "arrivals that nobody waits for"
