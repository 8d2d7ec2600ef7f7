"""The optimizer of a model: AdamW for all parameters, or Muon for the matrices of the blocks and AdamW for the rest.

    params    w₀ ░ w₁ ░ … ░ b₀ ░ b₁ …        one flat range (P,); ░ is an alignment gap, always zero
    grads     the same layout
    m, v      the same layout; with Muon, v has only AdamW's parameters
    ema       the same layout; only with an average of the weights
    rounded   the bfloat16 copies that layers compute with on CUDA, in the same layout

Parameters that Muon updates come first, then others of two or more dimensions, then the rest. So weight decay applies to a
prefix of the range, or of each bucket of a sharded optimizer.

    norm = ‖grads‖₂        guard        clip to max_norm        Muon, AdamW, ema       (equations: kernels/muon, adamw, ema)

The guard skips a step with a non-finite loss or gradient. If the buffers of the optimizer are handles, the update is traced and
planned together with the step of the model. If they are tensors, the update runs. The scratch of the update is live only during
the update, so it shares addresses with the activations.

With a sharded optimizer (dist/schedule.py), params and grads are cut into padded buckets, and a rank updates its slice of each
bucket. m, v and ema have only these slices, in order, and so do the float32 masters if there are bfloat16 copies:

    params    │ bucket 0: 0 1 2 3 │ bucket 1: 0 1 2 3 │ …       m, v, ema of rank 2:  │ 2 │ 2 │ …

In a bucket that Muon updates, each slice has whole matrices (dist/schedule.py). If everything is sharded, each unit is a bucket
(dist/units.py), and params and grads have only this rank's slices too.

With `States` (model/layer.py), m and v, params or grads may be bfloat16; the layout in elements is the same. AdamW rounds m, v
and params to bfloat16 stochastically. The random bits of an element depend on `seed`, `adam_step` and the index that the
element has in the params of a single process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..kernels.adamw import adamw_step, adamw_workspace
from ..kernels.ema import ema_step, ema_workspace, swap
from ..kernels.global_norm import global_norm, global_norm_workspace
from ..kernels.guard import guard, guard_workspace
from ..kernels.muon import Matrices, Matrix, MuonConfig, muon_step, muon_workspace
from ..kernels.philox import signed
from ..kernels.residual import Gaps, zero_gaps
from ..kernels.scratch import Scratch, Shapes, accumulation_dtype, below, larger, of
from ..kernels.stochastic_rounding import Place, Places
from ..memory.planned.arena import flat
from ..memory.planned.trace import FlatHandle, Handle, handles
from ..memory.types import BufferType, Role
from ..model.layer import FULL, Buffer, Param, States
from .dist.schedule import Bucket
from .dist.units import Units

MAX_SKIPPED = 10
_COUNTERS = ("steps", "skipped", "skipped_in_a_row")


class NonFiniteError(RuntimeError):
    """Ten steps in a row had a loss or a gradient that was not finite."""


@dataclass(frozen=True, slots=True)
class AdamW:
    """AdamW's hyperparameters, and `max_norm`, the global norm to which gradients are clipped. Muon uses weight_decay and
    max_norm too."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0


@dataclass(frozen=True, slots=True)
class StepResult:
    """The mean loss over the targets of a step, and the norm of its gradients before clipping. If the norm is not finite, the
    step was skipped. jumps: how many tensors were rounded to float8 after their largest magnitude had grown 100-fold since the
    step before."""

    loss: float
    norm: float
    jumps: int = 0


def in_arena_order(params: Iterable[Param], muon: MuonConfig | None = None) -> list[Param]:
    """Parameters in the order of the arena: those that Muon updates, then others of two or more dimensions, then all others."""
    return sorted(params, key=lambda p: (not _by_muon(p, muon), len(p.master.shape) < 2))


def _by_muon(p: Param, muon: MuonConfig | None) -> bool:
    return muon is not None and bool(p.matrices)


class Owned(NamedTuple):
    """Flat buffers of equal length that one rank updates. The first `decayed` elements have weight decay. Muon updates these
    buffers if v is None, otherwise AdamW does."""

    params: Buffer
    grads: Buffer
    m: Buffer
    v: Buffer | None
    ema: Buffer | None
    rounded: Buffer | None
    decayed: int
    matrices: Matrices
    places: Places  # the indices that the elements have in the params of a single process


def _flat_of(
    name: str, ordered: Sequence[Param], buckets: Sequence[Bucket], buffer_of: Callable[[Param], Buffer]
) -> FlatHandle:
    """A flat handle over one buffer of each parameter, with the padding of the buckets."""
    buffers = list(handles([buffer_of(p) for p in ordered]))
    if not buckets:
        return flat(name, buffers)
    by_name, form = {p.name: h for p, h in zip(ordered, buffers, strict=True)}, buffers[0]
    parts: list[Handle] = []
    for member in (member for bucket in buckets for member in bucket.members):
        if isinstance(member, str):
            parts.append(by_name[member])
            continue
        pad = f"{'d ' if form.role == 'grads' else ''}pad.{len(parts)}"
        pads = (form.role, "pads", form.device, None, form.multiple)
        parts.append(Handle(pad, (member,), form.dtype, BufferType.COMM, *pads))
    return flat(name, parts)


def _grads_and_values(
    ordered: Sequence[Param], buckets: Sequence[Bucket], units: Units | None
) -> tuple[FlatHandle, FlatHandle]:
    """Flat handles over gradients and parameter values, with the padding of the buckets. With `units` they have only this
    rank's parts."""
    name = "params" if ordered[0].value is ordered[0].master else "rounded"
    if units is not None:
        return flat("grads", list(handles(units.grad_parts))), flat(name, list(handles(units.value_parts)))
    grads = _flat_of(
        "grads", ordered, buckets, lambda p: cast(Buffer, p.kept_grad)
    )  # `ordered` has no frozen parameter
    return grads, _flat_of(name, ordered, buckets, lambda p: p.value)


@dataclass(frozen=True, slots=True)
class _Flats:
    """Flat handles of parameters, gradients, moments, averages and rounded copies. `_slices` says which of them have only this
    rank's slices if the optimizer is sharded."""

    masters: FlatHandle
    grads: FlatHandle
    m: FlatHandle
    v: FlatHandle | None
    ema: FlatHandle | None
    rounded: FlatHandle | None


def _slices(
    flats: _Flats,
    buckets: Sequence[Bucket],
    owner: tuple[int, int],
    matrices: Matrices,
    places: Places,
    *,
    of_units: bool,
) -> Iterator[Owned]:
    """For each bucket, the slice that owner = (rank, world) updates. m, v and ema have only these slices, and so do the
    masters if there are rounded copies; with of_units, all buffers have only these slices. `matrices` are all matrices that
    Muon updates, `places` the places of all elements."""
    masters, grads, m, v, ema, rounded = flats.masters, flats.grads, flats.m, flats.v, flats.ema, flats.rounded
    at = at_v = 0
    for bucket in buckets:
        start, stop = bucket.part(*owner)
        in_slices = at, at + stop - start
        in_values = in_slices if of_units else (start, stop)
        params = masters.part(*(in_values if rounded is None else in_slices))
        copies = None if rounded is None else _buffer(rounded.part(*in_values))
        decayed = min(max(bucket.start + bucket.decayed - start, 0), stop - start)
        dparams, momentum, variance = _buffer(grads.part(*in_values)), _buffer(m.part(*in_slices)), None
        if not bucket.whole:
            assert v is not None
            variance, at_v = _buffer(v.part(at_v, at_v + stop - start)), at_v + stop - start
        average = None if ema is None else _buffer(ema.part(*in_slices))
        state = (_buffer(params), dparams, momentum, variance, average)
        yield Owned(*state, copies, decayed, _inside(matrices, start, stop), _places_inside(places, start, stop))
        at = in_slices[1]


def _ranges(masters: FlatHandle, ordered: Sequence[Param], by_muon: int) -> list[Bucket]:
    """Buckets of an optimizer that is not sharded: the first `by_muon` parameters, which Muon updates, and the rest. Empty
    buckets are left out."""
    ends = (*masters.starts, masters.shape[0])
    first, size, decayed = ends[by_muon], masters.shape[0], ends[sum(len(p.master.shape) >= 2 for p in ordered)]
    buckets = [Bucket((), 0, first, first, whole=True)] if by_muon else []
    return buckets + ([Bucket((), first, size, max(decayed - first, 0))] if by_muon < len(ordered) else [])


def _matrices(ordered: Sequence[Param], starts: dict[str, int]) -> Iterator[Matrix]:
    """The matrices that Muon updates, with their offsets in `grads`."""
    by_name = {p.name: p.matrices for p in ordered}
    for name, start in starts.items():
        for rows, columns in by_name.get(name, ()):  # a pad has no matrices
            yield Matrix(start, rows, columns)
            start += rows * columns


def _inside(matrices: Matrices, start: int, stop: int) -> Matrices:
    """The matrices inside [start, stop), with their offsets from `start`."""
    return tuple(x._replace(start=x.start - start) for x in matrices if start <= x.start < stop)


def _places(ordered: Sequence[Param], starts: dict[str, int]) -> Places:
    """The places of the elements of all parameters in the range in which `starts` counts, with the indices that they have in
    the params of a single process. Parameters that follow each other both in this range and in these params share a place."""
    alone = _flat_of("params", ordered, (), lambda p: p.master)
    places: list[Place] = []
    for start, element in sorted((starts[p.name], first) for p, first in zip(ordered, alone.starts, strict=True)):
        if not places or element - start != places[-1].element - places[-1].start:
            places.append(Place(start, element))
    return tuple(places)


def _places_inside(places: Places, start: int, stop: int) -> Places:
    """The places of the elements [start, stop), with their offsets from `start`."""
    before = [place for place in places if place.start <= start]
    inside = [Place(place.start - start, place.element) for place in places if start < place.start < stop]
    return (*(Place(0, place.element + start - place.start) for place in before[-1:]), *inside)


def _buffer(handle: Handle) -> Buffer:
    return cast(Buffer, handle)


def _handle(like: Handle, name: str, shape: tuple[int, ...], dtype: torch.dtype, role: Role = "optimizer") -> Handle:
    multiple = like.multiple if role == "optimizer" and shape else 1
    return Handle(name, shape, dtype, BufferType.TEMP, role, "optimizer", like.device, None, multiple)


def _flats(
    ordered: Sequence[Param],
    by_adamw: Sequence[Param],
    states: States,
    buckets: Sequence[Bucket],
    units: Units | None,
    world: int,
    *,
    averaged: bool,
) -> _Flats:
    form, copied = next(handles(ordered[0].master)), ordered[0].value is not ordered[0].master
    acc = accumulation_dtype(form.dtype)
    moments_dtype = torch.bfloat16 if states.moments == "bfloat16" else acc

    def state(name: str, of: Sequence[Param], dtype: torch.dtype = acc) -> FlatHandle | None:
        if not buckets:
            state_handles = [_handle(form, f"{name}.{p.name}", p.master.shape, dtype) for p in of]
            return flat(name, state_handles) if state_handles else None
        size = sum(b.stop - b.start for b in buckets if of is ordered or not b.whole) // world
        return flat(name, [_handle(form, f"optimizer.{name}", (size,), dtype)]) if size else None

    grads, values = _grads_and_values(ordered, buckets, units)
    masters, rounded = values, None
    if copied:
        rounded = values
        masters = _flat_of("params", ordered, (), lambda p: p.master)
        if buckets:
            masters = cast(FlatHandle, state("master", ordered))
    m, v = cast(FlatHandle, state("m", ordered, moments_dtype)), state("v", by_adamw, moments_dtype)
    return _Flats(masters, grads, m, v, state("ema", ordered) if averaged else None, rounded)


def _scratch_of(
    flats: _Flats,
    owned: Sequence[Owned],
    states: States,
    muon: MuonConfig | None,
    matrices: Matrices,
    buckets: Sequence[Bucket],
    world: int,
) -> Shapes:
    masters = flats.masters
    scratch = (
        below("global_norm", global_norm_workspace(*(own.grads for own in owned)))
        | below("guard", guard_workspace())
        | below("adamw", adamw_workspace(masters, lean=states.lean))
        | (below("ema", ema_workspace(masters)) if flats.ema is not None else {})
    )
    if muon is not None and matrices:  # the most scratch that any rank needs, because all ranks have the same plan
        for r in range(world):
            parts = [_inside(matrices, *bucket.part(r, world)) for bucket in buckets]
            scratch = larger(scratch, below("muon", muon_workspace(masters, muon, parts)))
    return scratch


def _shapes(by_kind: Mapping[str, Sequence[Param]]) -> dict[str, tuple[int, ...]]:
    return {f"{kind}.{p.name}": tuple(p.master.shape) for kind, params in by_kind.items() for p in params}


@dataclass(slots=True)
class Optimizer:
    """The buffers of an optimizer, as handles or tensors. params, grads, m, v, ema and rounded are flat. `steps` also counts
    skipped updates."""

    params: Buffer
    grads: Buffer
    m: Buffer
    v: Buffer | None
    ema: Buffer | None
    adam_step: Buffer  # 0-d float32: the number of updates, without skipped ones
    norm: Buffer  # 0-d: the gradient norm before clipping; not finite if the step is skipped
    loss: Buffer  # 0-d: the loss of the step
    in_a_row: Buffer  # 0-d float32: the number of steps skipped in a row
    rounded: Buffer | None
    moments: dict[str, Buffer]  # m.NAME, v.NAME (only AdamW's) and ema.NAME, in the parameter's shape; empty if sharded
    shapes: dict[str, tuple[int, ...]]  # the shapes of all moments, even if sharded
    owned: tuple[Owned, ...]  # the buffers that this rank updates: a slice of each bucket, or all parameters
    seed: Buffer | None  # 0-d int64: the seed of stochastic rounding; None: nothing is rounded stochastically
    agreed: Buffer | None  # (3,) float64, with several ranks: squared norm, loss, stop
    largest: Buffer | None  # (S,) float32, with several ranks: the largest magnitude of each tensor in float8
    starts: dict[str, int]  # parameter → its first element in `grads`, or in the flat range of all units
    scratch: Scratch
    adamw: AdamW
    gaps: Gaps = ()  # the alignment gaps in `grads`, if it shares memory with activations
    muon: MuonConfig | None = None
    decay: float = 0.0  # the decay of ema; 0: there is no average
    steps: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0

    @classmethod
    def declare(
        cls,
        params: Iterable[Param],
        adamw: AdamW | None = None,
        muon: MuonConfig | None = None,
        decay: float = 0.0,
        *,
        rank: int = 0,
        world: int = 1,
        buckets: Sequence[Bucket] = (),
        units: Units | None = None,
        states: States = FULL,
        scales: int = 0,
    ) -> Optimizer:
        """The optimizer of one rank of `world`, sharded by `buckets`, or by `units` if everything is sharded. scales: how many
        tensors are rounded to float8."""
        ordered = in_arena_order(params, muon)
        by_adamw = [p for p in ordered if not _by_muon(p, muon)]
        form = next(handles(ordered[0].master))
        acc = accumulation_dtype(form.dtype)
        buckets = buckets if units is None else tuple(units.buckets.values())
        sharded = bool(buckets)

        def buffer(name: str, shape: tuple[int, ...], dtype: torch.dtype, role: Role = "optimizer") -> Buffer:
            return _buffer(_handle(form, name, shape, dtype, role))

        flats = _flats(ordered, by_adamw, states, buckets, units, world, averaged=bool(decay))
        grads, m, v, ema = flats.grads, flats.m, flats.v, flats.ema
        starts = dict(zip((h.name.removeprefix("d ") for h in grads.buffers), grads.starts, strict=True))
        if not sharded:
            buckets = _ranges(flats.masters, ordered, len(ordered) - len(by_adamw))
        owner = (rank, world) if sharded else (0, 1)
        matrices = tuple(_matrices(ordered, starts)) if muon is not None else ()
        places = _places(ordered, starts if units is None else units.starts)
        owned = tuple(_slices(flats, buckets, owner, matrices, places, of_units=units is not None))
        scratch = _scratch_of(flats, owned, states, muon, matrices, buckets, owner[1])
        return cls(
            params=_buffer(flats.masters),
            grads=_buffer(grads),
            m=_buffer(m),
            v=None if v is None else _buffer(v),
            ema=None if ema is None else _buffer(ema),
            adam_step=buffer("optimizer.step", (), torch.float32),
            norm=buffer("optimizer.norm", (), acc),
            loss=buffer("optimizer.loss", (), acc),
            in_a_row=buffer("optimizer.in_a_row", (), torch.float32),
            rounded=None if flats.rounded is None else _buffer(flats.rounded),
            moments={} if sharded else {h.name: _buffer(h) for kept in (m, v, ema) if kept for h in kept.buffers},
            shapes=_shapes({"m": ordered, "v": by_adamw, "ema": ordered if decay else []}),
            owned=owned,
            seed=buffer("optimizer.seed", (), torch.int64) if states.rounds else None,
            agreed=buffer("optimizer.agreed", (3,), torch.float64) if world > 1 else None,
            largest=buffer("optimizer.largest", (scales,), torch.float32) if world > 1 and scales else None,
            starts=starts if units is None else units.starts,
            scratch={name: buffer(f"scratch.optimizer.{name}", *x, "activations") for name, x in scratch.items()},
            adamw=adamw or AdamW(),
            gaps=grads.gaps if grads.role == "activations" else (),
            muon=muon,
            decay=decay,
        )

    def update(self, learning_rate: float | Tensor) -> None:
        """Clip gradients to a global norm of `max_norm`, update by Muon and AdamW, then update the average of the weights. A
        step with a non-finite loss or gradient leaves weights, moments and average unchanged. After ten such steps in a row,
        later steps change nothing either."""
        self.measure()
        self.apply(learning_rate)

    def measure(self) -> None:
        """norm = ‖the gradients that this rank owns‖₂"""
        if self.gaps:
            zero_gaps(self.gaps, x=self.grads)
        global_norm([x.grads for x in self.owned], norm=self.norm, scratch=of("global_norm", self.scratch))

    def apply(self, learning_rate: float | Tensor) -> None:
        """Run the guard, clip, and update by Muon and AdamW; then update the average. `norm` must already be the norm of the
        gradients of all ranks."""
        adamw = self.adamw
        by_adamw = [owned for owned in self.owned if owned.v is not None]
        guard(
            self.loss,
            MAX_SKIPPED,
            norm=self.norm,
            in_a_row=self.in_a_row,
            step=None if by_adamw else self.adam_step,
            scratch=of("guard", self.scratch),
        )
        if by_adamw:
            params, grads, m, v, _, rounded, decayed, _, places = map(list, zip(*by_adamw, strict=True))
            adamw_step(
                self.norm,
                learning_rate,
                decayed,
                adamw.weight_decay,
                adamw.max_norm,
                adamw.betas,
                adamw.eps,
                self.seed,
                places,
                params=params,
                grads=grads,
                m=m,
                v=v,
                step=self.adam_step,
                rounded=None if self.rounded is None else rounded,
                scratch=of("adamw", self.scratch),
            )
        by_muon = [owned for owned in self.owned if owned.matrices]
        if by_muon and self.muon is not None:
            params, grads, m, _, _, rounded, _, matrices, _ = map(list, zip(*by_muon, strict=True))
            muon_step(
                self.norm,
                learning_rate,
                self.muon,
                matrices,
                adamw.weight_decay,
                adamw.max_norm,
                step=self.adam_step,
                params=params,
                grads=grads,
                m=m,
                rounded=None if self.rounded is None else rounded,
                scratch=of("muon", self.scratch),
            )
        averages = [owned.ema for owned in self.owned if owned.ema is not None]
        if averages:
            masters = [owned.params for owned in self.owned]
            ema_step(masters, self.norm, self.adam_step, self.decay, ema=averages, scratch=of("ema", self.scratch))

    def begin_average(self) -> None:
        """ema = params. Called before the first update."""
        for owned in self.owned:
            if owned.ema is not None:
                owned.ema.copy_(owned.params)

    def swap_average(self) -> None:
        """Exchange params and ema, in the slices of this rank."""
        for owned in self.owned:
            if owned.ema is not None:
                swap(owned.params, owned.ema)

    def set_seed(self, seed: int) -> None:
        """Set the seed of stochastic rounding."""
        if self.seed is not None:
            self.seed.fill_(signed(seed))

    def count(self, result: StepResult) -> None:
        """Count a finished update. Ten skipped updates in a row raise NonFiniteError."""
        self.steps += 1
        if math.isfinite(result.norm):
            self.skipped_in_a_row = 0
            return
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= MAX_SKIPPED:
            raise NonFiniteError(
                f"the loss or the gradient was not finite in {MAX_SKIPPED} steps in a row (loss {result.loss}, "
                f"norm {result.norm}): weights are as before the first of these steps; lower the learning rate or "
                "look at the data"
            )

    def tensors(self) -> dict[str, Tensor]:
        return {**self.moments, "adam_step": self.adam_step}

    def state(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _COUNTERS}

    def restore(self, state: dict[str, int]) -> None:
        for name in _COUNTERS:
            setattr(self, name, int(state[name]))
        self.in_a_row.fill_(self.skipped_in_a_row)
