"""Forward and backward of dilated attention on plain tensors. A plan lists the calls of attention. Each signature
has one plan, which is cached.

    "head_groups", G branches: y = o_g / G in the heads of group g
    "longnet", branches b that cover a position: y = Σ_b softmax_b(lse_b) o_b in every head

The sum in "longnet" is one softmax over the keys of all branches: softmax_b(lse_b) exp(s − lse_b) = exp(s − lse) with
lse = log Σ_b exp lse_b. So its exact gradient is attention's backward over each branch, with y and this lse instead of o_b and
lse_b: ds = exp(s − lse) (dy·v − dy·y). Neither o_b nor its gradient is saved for the backward. The backward of "head_groups" is
attention's backward with do = dy / G and o = G y.

Tensors that are returned or saved for the backward come from torch: y, lse (B, H, T), and the gradients. So do the seeds of
dropout, and a copy of dy if its layout is not y's. Scratch comes from the manager, if there is one: a TEMP buffer per pass and,
in a forward of "longnet", an OUTPUT buffer. Both are as large as the largest call needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.attention import table
from ...kernels.attention.api import Run, Selection, Signature, select
from ...kernels.attention.mask import Mask
from ...kernels.attention.problem import Backward, Forward, lse_dtype
from ...kernels.cache import remember
from ...kernels.checks import ALIGNED_BYTES, rows_aligned
from ...kernels.mix import mix_fwd, mix_workspace
from ...kernels.philox import signed
from ...kernels.scratch import Form, Layout, Shapes, below, of
from ...memory.types import BufferType
from ..scratch import borrowed
from .pattern import Branch, Mode, StridedCall, View, branches

WEYL = 0x9E3779B97F4A7C15  # odd, so 2⁶⁴ calls have different seeds


class Options(NamedTuple):
    """The arguments of the ops that are not tensors. `training`: a backward follows."""

    segments: list[int]
    rates: list[int]
    mode: Mode
    causal: bool
    scale: float | None
    dropout_p: float
    deterministic: bool
    kernel: str | None
    training: bool
    manager: int

    @property
    def divisor(self) -> int:
        return len(self.rates) if self.mode == "head_groups" else 1


class Job(NamedTuple):
    """A call of attention: its kernels and the layouts of its buffers. `added`: the call adds to the result of earlier
    branches."""

    fwd: Selection
    bwd: Selection
    added: bool
    views: dict[str, View]  # views of q, k, v, y, lse, dq, dk, dv
    forward_layout: Layout
    backward_layout: Layout
    part_layout: Layout  # o of a call with `added`
    prepared: dict[object, Run]

    def run(self, call: Forward | Backward, temp: Tensor) -> None:
        """Runs the kernel. It is prepared once for each direction, set of wanted gradients and alignment of `temp`."""
        backward = isinstance(call, Backward)
        wanted = (call.dq is None, call.dk is None, call.dv is None) if isinstance(call, Backward) else None
        key = wanted, temp.data_ptr() % ALIGNED_BYTES
        run = self.prepared.get(key)
        if run is None:
            layout = (self.backward_layout if backward else self.forward_layout).below("attention")
            run = self.prepared[key] = (self.bwd if backward else self.fwd).prepare(call, layout.of)
        run(call)


class Plan(NamedTuple):
    """All jobs. Forward and backward request buffers of the same sizes, so that a manager can reuse them."""

    branches: tuple[Branch, ...]
    jobs: tuple[Job, ...]
    temp_bytes: int
    part_bytes: int


_plans: dict[Signature, Plan] = {}


def _plan(qkv: Sequence[Tensor], y: Tensor, lse: Tensor, options: Options) -> Plan:
    """The plan of a call, cached by everything that it depends on."""
    forms = [(x.shape, x.stride(), x.data_ptr() % ALIGNED_BYTES) for x in (*qkv, y)]
    patterns = (tuple(options.segments), tuple(options.rates), *options[2:-1])
    key = (*forms, y.dtype, y.device, patterns, torch.get_num_threads(), id(table.ATTENTION))
    plan = _plans.get(key)
    return plan if plan is not None else remember(_plans, key, _new_plan(qkv, y, lse, options))


def _new_plan(qkv: Sequence[Tensor], y: Tensor, lse: Tensor, options: Options) -> Plan:
    if not qkv[0].numel() or not y.numel():
        return Plan((), (), 0, 0)
    b, h, t, _ = y.shape
    strides = tuple([x.stride()[:3] for x in (*qkv, y)])
    all_branches = branches((b, h, t), strides, tuple(options.segments), tuple(options.rates), options.mode)
    jobs = []
    for number, branch in enumerate(all_branches):
        added = options.mode == "longnet" and number > 0
        jobs += [_job(call, qkv, y, lse, options, added=added) for call in branch.calls]
    temp = max(job.forward_layout.nbytes for job in jobs)
    if options.training:
        temp = max(temp, *(job.backward_layout.nbytes for job in jobs))
    return Plan(all_branches, tuple(jobs), temp, max(job.part_layout.nbytes for job in jobs))


def _job(call: StridedCall, qkv: Sequence[Tensor], y: Tensor, lse: Tensor, options: Options, *, added: bool) -> Job:
    q, k, v = (call.of(x) for x in qkv)
    mask = Mask(options.causal, scale=options.scale, dropout_p=options.dropout_p, seed=0 if options.dropout_p else None)
    fwd = select(q, k, v, mask, {}, options.kernel, backward=False)
    bwd = select(q, k, v, mask, {}, options.kernel, backward=True, deterministic=options.deterministic)
    forward, backward = below("attention", fwd.scratch), below("attention", bwd.scratch)
    part: Shapes = {}
    output = (*call.shape, y.shape[3]), y.dtype
    if options.divisor > 1:
        backward |= {"o": output, "do": output}
    if added:
        forward |= below("mix", mix_workspace(Form(*output, y.device))) | {"lse": (call.shape, lse.dtype)}
        backward |= {f"d{name}": (tuple(x.shape), y.dtype) for name, x in zip("qkv", (q, k, v), strict=True)}
        part = {"o": output}
    views = {name: call.view_of(x) for name, x in zip("qkvy", (*qkv, y), strict=True)} | {"lse": call.view_of(lse)}
    views |= {f"d{name}": _widened(views["y"], x.shape[3]) for name, x in zip("qkv", qkv, strict=True)}
    return Job(fwd, bwd, added, views, Layout(forward), Layout(backward), Layout(part), {})


def _widened(y: View, d: int) -> View:
    """The rows of `y` in a tensor with y's memory order and d columns instead of y's dv."""
    *shape, dv = y.shape
    return View((*shape, d), (*(n // dv * d for n in y.strides[:3]), 1), y.start // dv * d)


_MASKS = {causal: Mask(causal) for causal in (False, True)}


def _masks(options: Options, seed: Tensor | None, calls: int) -> list[Mask]:
    """One mask per call. With dropout, each mask has a different seed."""
    if seed is None:
        plain = _MASKS[options.causal] if options.scale is None else Mask(options.causal, scale=options.scale)
        return [plain] * calls
    seeds = (seed + signed(number * WEYL % 2**64) if number else seed for number in range(calls))
    return [Mask(options.causal, scale=options.scale, dropout_p=options.dropout_p, seed=each) for each in seeds]


def _in_order_of(q: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A new (B, H, T, …) in q's memory order: (B, T, H, …) if heads have the smaller stride."""
    b, h, t, *rest = shape
    if q.stride(1) < q.stride(2):
        return q.new_empty((b, t, h, *rest), dtype=dtype).transpose(1, 2)
    return q.new_empty(tuple(shape), dtype=dtype)


def new_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    y = _in_order_of(q, (*q.shape[:3], v.shape[3]), q.dtype)
    return y, _in_order_of(q, q.shape[:3], lse_dtype(q.dtype))


def new_gradients(q: Tensor, k: Tensor, v: Tensor, wanted: Sequence[bool]) -> list[Tensor]:
    pairs = zip((q, k, v), wanted, strict=True)
    return [_in_order_of(q, x.shape, q.dtype) if want else q.new_empty(0) for x, want in pairs]


def _zero_where_uncovered(plan: Plan, options: Options, *tensors: Tensor) -> None:
    """Zeros the heads of branches that do not cover all positions. In "longnet" only the first branch, which covers the most
    positions, decides."""
    heads = [b.heads for b in (plan.branches[:1] if options.mode == "longnet" else plan.branches) if not b.covers_all]
    for start, stop in _merged(heads):
        for x in tensors:
            x[:, start:stop].zero_()


def _merged(ranges: Sequence[range]) -> list[tuple[int, int]]:
    """(start, stop) of the ranges, with adjacent ranges merged, so that they take one launch."""
    merged: list[tuple[int, int]] = []
    for heads in ranges:
        if merged and merged[-1][1] == heads.start:
            merged[-1] = merged[-1][0], heads.stop
        else:
            merged.append((heads.start, heads.stop))
    return merged


def forward(q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, *arguments: Any) -> tuple[Tensor, Tensor]:
    options = Options(*arguments)
    y, lse = new_outputs(q, v)
    plan = _plan((q, k, v), y, lse, options)
    _zero_where_uncovered(plan, options, y)
    if options.mode == "longnet" and plan.branches and not plan.branches[0].covers_all:
        lse.fill_(-torch.inf)
    with (
        borrowed(options.manager, BufferType.TEMP, plan.temp_bytes, q.device) as temp,
        borrowed(options.manager, BufferType.OUTPUT, plan.part_bytes, q.device) as part,
    ):
        views = {"q": q, "k": k, "v": v, "y": y, "lse": lse}
        for job, mask in zip(plan.jobs, _masks(options, seed, len(plan.jobs)), strict=True):
            _run_forward(job, views, mask, 1 / options.divisor, temp, part)
    return y, lse


def _run_forward(job: Job, tensors: dict[str, Tensor], mask: Mask, factor: float, temp: Tensor, part: Tensor) -> None:
    scratch = job.forward_layout.of(temp)
    q, k, v, o, lse = (job.views[name].of(x) for name, x in tensors.items())
    if not job.added:
        job.run(Forward(q, k, v, mask, o, lse, (temp,)), temp)
        if factor != 1.0:
            o *= factor
        return
    part_o, part_lse = job.part_layout.of(part)["o"], scratch["lse"]
    job.run(Forward(q, k, v, mask, part_o, part_lse, (temp,)), temp)
    mix_fwd(part_o, part_lse, o=o, lse=lse, scratch=of("mix", scratch))


def backward(
    q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, dy: Tensor, seed: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    *arguments, wanted = rest
    options = Options(*arguments)
    grads = new_gradients(q, k, v, wanted)
    plan = _plan((q, k, v), y, lse, options)
    if not rows_aligned(dy) or any(n > 1 and a != b for n, a, b in zip(y.shape, dy.stride(), y.stride(), strict=True)):
        dy = torch.empty_like(y).copy_(dy)
    written = {name: x for name, x, want in zip(("dq", "dk", "dv"), grads, wanted, strict=True) if want}
    _zero_where_uncovered(plan, options, *written.values())
    with borrowed(options.manager, BufferType.TEMP, plan.temp_bytes, q.device) as temp:
        read = {"q": q, "k": k, "v": v, "y": y, "lse": lse}
        for job, mask in zip(plan.jobs, _masks(options, seed, len(plan.jobs)), strict=True):
            _run_backward(job, read, dy, written, mask, options, temp)
    return tuple(grads)


def _run_backward(
    job: Job,
    read: dict[str, Tensor],
    dy: Tensor,
    written: dict[str, Tensor],
    mask: Mask,
    options: Options,
    temp: Tensor,
) -> None:
    scratch = job.backward_layout.of(temp)
    q, k, v, o, lse = (job.views[name].of(x) for name, x in read.items())
    do, grads = job.views["y"].of(dy), {name: job.views[name].of(x) for name, x in written.items()}
    if options.divisor > 1:
        o = torch.mul(o, options.divisor, out=scratch["o"])
        do = torch.mul(do, 1 / options.divisor, out=scratch["do"])
    dq, dk, dv = ((scratch if job.added else grads).get(name) for name in ("dq", "dk", "dv"))
    job.run(Backward(q, k, v, o, lse, do, None, mask, dq, dk, dv, None, None, (temp,), options.deterministic), temp)
    if job.added:
        for name, x in grads.items():
            x += scratch[name]
