"""A training step as one CUDA graph. Inputs and results pass through pinned memory.

    stream   copy in │ inputs · forward · backward · (next micro-batch …) · norm · guard · update │ copy out │ copy in │ …
    host       read step k − 2 │ stage step k + 1 … │                        the host never waits for the newest step

Tokens, targets, documents, dropout's seeds and the learning rate change from step to step. They are copied to one buffer on the
device, `staged`, before the graph starts. The device counts the targets and decides whether to skip the step. The results
are copied back. So the graph needs no arguments, and a replay allocates nothing.

The first step with new shapes runs op by op, and the second is captured (`CapturedProgram`). Both run `DeviceStep.program`, so
they compute the same bits.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ..kernels.cpu.library import merge_native
from ..kernels.op import Calls, emitter, record
from ..model.layer import Packed
from ..model.transformer import Transformer
from .batch import Batch, write_documents
from .optimizer import Optimizer, StepResult
from .step import accumulate_gradients

K = TypeVar("K")
P = TypeVar("P")

DEPTH = 3  # the most submitted steps in flight
MOST_SHAPES = 32  # a decoder or a scorer keeps its programs for this many shapes of inputs


@dataclass(frozen=True, slots=True)
class Staged:
    """The inputs of a step, as views of one int64 buffer. Each tuple has one element for each micro-batch: `tokens` and
    `targets` (b, t), `seeds` of dropout (one for each block), and `packed` with the documents' cu_seqlens and positions.

    The buffer begins with tokens and targets, which the caller may have on the device. `from_host` is the rest of the buffer,
    which the host computes for every step."""

    buffer: Tensor
    from_host: Tensor
    tokens: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    seeds: tuple[Tensor, ...]
    packed: tuple[Packed, ...]  # empty without packed rows
    learning_rate: Tensor  # 0-d float32

    @classmethod
    def of(cls, models: Sequence[Transformer], device: torch.device | None = None) -> Staged:
        """The buffer is on `device`, or in pinned memory if `device` is None."""
        sizes = [model.tokens.numel() for model in models for _ in ("tokens", "targets")]
        on_device = sum(sizes)
        for model in models:
            sizes.append(len(model.seeds))
            if model.packed is not None:
                sizes += [model.tokens.numel(), (model.packed.cu_seqlens.numel() + 1) // 2]
        pinned = device is None
        buffer = torch.zeros(sum(sizes) + 1, dtype=torch.int64, device=device or "cpu", pin_memory=pinned)
        parts = iter(buffer.split([*sizes, 1]))
        tokens, targets, seeds, packed = [], [], [], []
        for model in models:
            tokens.append(next(parts).view(model.tokens.shape))
            targets.append(next(parts).view(model.tokens.shape))
        for model in models:
            seeds.append(next(parts))
            if model.packed is not None:
                positions = next(parts).view(model.tokens.shape)
                packed.append(Packed(next(parts).view(torch.int32)[: model.packed.cu_seqlens.numel()], positions))
        learning_rate = next(parts).view(torch.float32)[0]
        return cls(
            buffer, buffer[on_device:], tuple(tokens), tuple(targets), tuple(seeds), tuple(packed), learning_rate
        )

    def load(
        self, batches: Sequence[Batch], seeds: Sequence[Sequence[int]], learning_rate: float, *, through: Staged
    ) -> None:
        """Write the inputs of a step to this buffer on a device. `through` has the same layout in pinned memory. Inputs on the
        host are copied through this pinned memory, so that the host does not wait for earlier work of the stream."""
        through.write_from_host(batches, seeds, learning_rate)
        if all(x.device.type == "cpu" for tokens, targets, _ in batches for x in (tokens, targets)):
            through.write_tokens(batches)
            self.buffer.copy_(through.buffer, non_blocking=True)
        else:
            self.write_tokens(batches)
            self.from_host.copy_(through.from_host, non_blocking=True)

    def write_tokens(self, batches: Sequence[Batch]) -> None:
        for i, (tokens, targets, _) in enumerate(batches):
            self.tokens[i].copy_(tokens)
            self.targets[i].copy_(targets)

    def write_from_host(self, batches: Sequence[Batch], seeds: Sequence[Sequence[int]], learning_rate: float) -> None:
        for i, (*_, cu_seqlens) in enumerate(batches):
            if self.packed:
                write_documents(cu_seqlens, ends=self.packed[i].cu_seqlens, positions=self.packed[i].positions)
            if len(self.seeds[i]):
                self.seeds[i].copy_(torch.tensor(seeds[i], dtype=torch.int64))
        self.learning_rate.fill_(learning_rate)


@contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run the body of this context on `stream`, after earlier work and before later work of the stream that was current outside
    this context. On a CPU `stream` is None."""
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector: in a capture it could free the graph of a dead engine, which is not allowed then, and in a
    measurement it would take time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def keep(programs: dict[K, P], shape: K, program: P) -> None:
    """programs[shape] = program. If there are MOST_SHAPES programs, the oldest is dropped first."""
    if len(programs) >= MOST_SHAPES:
        programs.pop(next(iter(programs)))
    programs[shape] = program


class CapturedProgram:
    """A program of device ops on `models`. The first run is op by op and compiles every kernel. The next run with capture=True
    is captured, if all models can be captured, and later runs replay the graph.

    A graph contains the address of the cuBLAS workspace. torch keeps one workspace for each stream, and frees all of them
    whenever torch.compile captures a graph. Our graph would then write to memory that torch gave to other tensors. So we free
    the workspaces before our capture too: the graph then allocates a workspace in its own pool, and the pool lives as long as
    the graph. As with torch.compile, a graph that the user captured earlier may contain the address of a freed workspace.
    Programs that never run at the same time may share a `pool` (torch.cuda.graph_pool_handle) and its workspace.
    """

    def __init__(
        self,
        program: Callable[[], None],
        models: Sequence[Transformer],
        stream: torch.cuda.Stream,
        pool: torch.cuda._POOL_HANDLE | None = None,
    ) -> None:
        self.program, self.stream, self.pool = program, stream, pool
        self.capturable = all(block.attention.capturable for model in models for block in model.blocks)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.ran = False

    def run(self, *, capture: bool) -> None:
        """Run, capture or replay the program. The caller makes `stream` the current stream."""
        if self.graph is None and self.ran and capture and self.capturable:
            graph = torch.cuda.CUDAGraph()
            torch._C._cuda_clearCublasWorkspaces()
            with without_garbage_collection(), torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                self.program()
            self.graph = graph  # set only after a complete capture
        if self.graph is not None:
            self.graph.replay()
        else:
            self.program()
        self.ran = True


class RecordedProgram:
    """A program of ops on fixed buffers on a CPU. The first run lists the kernel calls, and later runs repeat them."""

    def __init__(self, program: Callable[[], None]) -> None:
        self.program = program
        self.calls: Calls | None = None

    def run(self) -> None:
        if emitter() is not None:  # an observer, such as the memory trace, needs the calls of ops
            self.program()
        elif self.calls is None:
            with record() as calls:
                self.program()
            self.calls = merge_native(calls)  # set only after a complete run
        else:
            for call in self.calls:
                call()


class DeviceStep:
    """A step on micro-batches of fixed shapes. Each micro-batch has its own model, and all models share the engine's arenas."""

    def __init__(
        self,
        models: Sequence[Transformer],
        optimizer: Optimizer,
        stream: torch.cuda.Stream,
        pool: torch.cuda._POOL_HANDLE | None = None,
    ) -> None:
        device, dtype = optimizer.params.device, optimizer.loss.dtype
        self.models, self.optimizer = tuple(models), optimizer
        self.staged = Staged.of(models, device)
        self.valid = torch.empty(max(x.numel() for x in self.staged.targets), dtype=torch.bool, device=device)
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)  # targets in a micro-batch, and in the step
        self.inv_total = torch.zeros((), dtype=dtype, device=device)
        self.result = torch.zeros(3, dtype=dtype, device=device)  # loss, norm, jumps
        self.captured = CapturedProgram(self.program, self.models, stream, pool)

    def program(self) -> None:
        self._count_targets()
        accumulate_gradients(self._loaded(), loss=self.optimizer.loss)
        self.optimizer.update(self.staged.learning_rate)
        self.result[0].copy_(self.optimizer.loss)
        self.result[1].copy_(self.optimizer.norm)
        if self.models[0].jumps is not None:
            self.result[2].copy_(self.models[0].jumps)

    def _loaded(self) -> Iterator[Transformer]:
        """Copies the staged inputs of each micro-batch into its model, and yields the model."""
        staged = self.staged
        for i, model in enumerate(self.models):
            model.tokens.copy_(staged.tokens[i])
            model.head.targets.copy_(staged.targets[i].view(-1))
            model.head.inv_total.copy_(self.inv_total)
            if model.packed is not None:
                model.packed.cu_seqlens.copy_(staged.packed[i].cu_seqlens)
                model.packed.positions.copy_(staged.packed[i].positions)
            for j, seed in enumerate(model.seeds):
                seed.copy_(staged.seeds[i][j])
            yield model

    def _count_targets(self) -> None:
        """inv_total = 1 / (number of targets in the whole step), or 0 if the step has no target."""
        in_batch, in_step = self.counts
        in_step.zero_()
        for targets in self.staged.targets:
            valid = torch.ge(targets.view(-1), 0, out=self.valid[: targets.numel()])
            in_step.add_(torch.sum(valid, 0, out=in_batch))
        self.inv_total.copy_(in_step).reciprocal_().nan_to_num_(posinf=0.0)


@dataclass(slots=True)
class _Slot:
    staged: Staged
    result: Tensor
    done: torch.cuda.Event


class StepQueue:
    """Holds at most DEPTH submitted steps of a stream, and returns their results in order."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self._free: dict[int, list[_Slot]] = {}
        self._running: deque[tuple[int, _Slot]] = deque()

    def submit(
        self, step: DeviceStep, batches: Sequence[Batch], seeds: Sequence[Sequence[int]], rate: float, *, capture: bool
    ) -> list[StepResult]:
        """Launch a step. If the queue is full, wait for the oldest step and return its result."""
        awaited = [self._take()] if len(self._running) >= DEPTH else []
        free = self._free.setdefault(id(step), [])
        slot = free.pop() if free else self._new(step)
        with torch.cuda.stream(self.stream):
            step.staged.load(batches, seeds, rate, through=slot.staged)
            step.captured.run(capture=capture)
            slot.result.copy_(step.result, non_blocking=True)
            slot.done.record(self.stream)
        self._running.append((id(step), slot))
        return awaited

    def finished(self, *, wait: bool) -> list[StepResult]:
        results = []
        while self._running and (wait or self._running[0][1].done.query()):
            results.append(self._take())
        return results

    def _take(self) -> StepResult:
        key, slot = self._running.popleft()
        slot.done.synchronize()
        self._free[key].append(slot)
        loss, norm, jumps = slot.result.tolist()
        return StepResult(loss, norm, int(jumps))

    def _new(self, step: DeviceStep) -> _Slot:
        result = torch.zeros_like(step.result, device="cpu", pin_memory=True)
        return _Slot(Staged.of(step.models), result, torch.cuda.Event())
