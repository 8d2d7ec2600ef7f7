"""Dilated attention for autograd: it checks, allocates what it returns, and runs attention on strided views.

    tilegrad::dilated_fwd(q, k, v, …) → (y, lse)          tilegrad::dilated_bwd(q, k, v, y, lse, dy, …) → (dq, dk, dv)

As with attention (autograd.py), eager calls go without the dispatcher.

"head_groups", G branches, the heads of group g:        "longnet", all heads in every branch:

    y = o_g / G                                             y = Σ_b softmax_b(lse_b) o_b over the branches at a position

The mix of "longnet" is one softmax over the keys of all branches: softmax_b(lse_b) exp(s − lse_b) = exp(s − lse) with
lse = log Σ_b exp lse_b. So its exact gradient is that of attention over each branch with the mixed y and lse in the place
of o and lse: ds = exp(s − lse) (dy·v − dy·y). Neither o_b nor a gradient of it is kept. The backward of "head_groups" is
attention's with do = dy / G and o = G y.

What is returned or kept for the backward is torch's: y, lse (B, H, T), and the gradients. All else is one TEMP buffer of the
manager's in each pass, and in a forward of "longnet" one OUTPUT buffer, as large as the largest call needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor

from ..autograd import _cast, _observed, _plain, _seed_tensor
from ..kernels.attention import table
from ..kernels.attention.api import Selected, Signature, select_bwd, select_fwd
from ..kernels.attention.checks import check_options, check_tensors, require
from ..kernels.attention.mask import Mask
from ..kernels.attention.problem import ALIGNED_BYTES, lse_dtype, rows_aligned
from ..kernels.cache import remember
from ..kernels.mix import mix_fwd, mix_workspace
from ..kernels.scratch import Form, Shapes, below, of
from ..managed import NO_OTHERS, Layout, borrowed, number_of
from ..memory.managed.manager import AttentionBufferManager
from ..memory.types import BufferType
from .pattern import MODES, Branch, Mode, StridedCall, View, branches

WEYL = 0x9E3779B97F4A7C15  # odd, so that the seeds of 2⁶⁴ calls are different


def dilated_attention(
    q: Tensor, k: Tensor, v: Tensor, segment_lengths: Sequence[int], dilation_rates: Sequence[int], *,
    mode: Mode = "head_groups", causal: bool = False, dropout_p: float = 0.0, seed: int | Tensor | None = None,
    attn_mask: None = None, bias: None = None, window: None = None, sinks: None = None,
    deterministic: bool | None = None, kernel: str | None = None, manager: AttentionBufferManager | None = None,
) -> Tensor:  # fmt: skip
    """Attention inside segments among every r-th position, with exact gradients; linear in T.       q, k, v (B, H, T, D)

    segment_lengths   s of each branch; the tail is a shorter segment, and one longer than T is T
    dilation_rates    r of each branch
    mode              "head_groups": contiguous groups of heads, as many as branches, the first ones larger by the remainder;
                      group g attends among positions (g mod r) :: r of its segments, gives 0 at the others, and the result
                      is divided by the number of branches.
                      "longnet": every branch covers all heads, head h begins at h mod r; branches are mixed at each position
                      by the softmax of their logsumexps. A position that no branch covers gives 0
    causal            a position attends to none behind it
    dropout_p         drops probabilities once, after the softmax; which ones is a pure function of seed and shapes
    manager           an AttentionBufferManager whose buffers the call works in; None: torch's allocator

    attn_mask, bias, window and sinks are refused. deterministic and kernel are those of `tilegrad.attention`; "reference"
    is refused, for it computes o and lse anew. The result is laid out in memory as q is.

    >>> import torch, tilegrad
    >>> q, k, v = torch.randn(3, 1, 6, 4096, 64)
    >>> tilegrad.dilated_attention(q, k, v, (1024, 4096), (1, 4), causal=True).shape
    torch.Size([1, 6, 4096, 64])
    """
    for name, given in (("attn_mask", attn_mask), ("bias", bias), ("window", window), ("sinks", sinks)):
        accepted = "None: dilated attention has segments, rates and causal, and nothing else"
        require(given is None, name, given, accepted, show=lambda x: "a tensor" if isinstance(x, Tensor) else repr(x))
    check_options(q, k, v, Mask(causal, dropout_p=dropout_p, seed=seed))
    check_tensors(q, k, v, Mask(causal))
    segments, rates = check_pattern(segment_lengths, dilation_rates, mode)
    require(k.shape[2] == q.shape[2], "k", f"{k.shape[2]} positions, and q has {q.shape[2]}", "as many", show=str)
    require(k.shape[1] == q.shape[1], "k", f"{k.shape[1]} heads, and q has {q.shape[1]}", "as many", show=str)
    fewer = mode == "head_groups" and q.shape[1] < len(segments)
    accepted = "as many heads as branches, or more"
    require(not fewer, "q", f"{q.shape[1]} heads for {len(segments)} branches", accepted, show=str)
    accepted = "None or a kernel that takes o and lse as given; reference computes them anew"
    require(kernel != "reference", "kernel", kernel, accepted)
    drawn = _seed_tensor(Mask(causal, dropout_p=dropout_p, seed=seed), q.device) if dropout_p else None
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    training = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    options = Options(
        segments, rates, mode, causal, float(dropout_p), deterministic, kernel, training, number_of(manager)
    )  # fmt: skip
    if not _observed() and _plain(q, k, v, drawn):
        if torch._C._is_any_autocast_enabled():
            q, k, v = _cast(q, k, v)
        return cast(Tensor, _Eager.apply(q, k, v, drawn, options)) if training else _fwd(q, k, v, drawn, *options)[0]
    transformed = torch._C._are_functorch_transforms_active()
    call = _Dilated.apply if transformed else torch.ops.tilegrad.dilated_fwd
    return cast(Tensor, call(q, k, v, drawn, *options)[0])


def check_pattern(
    segment_lengths: Sequence[int], dilation_rates: Sequence[int], mode: str
) -> tuple[list[int], list[int]]:
    """Lengths and rates as lists, of a mode that there is."""
    require(mode in MODES, "mode", mode, " or ".join(map(repr, MODES)))
    given = (("segment_lengths", segment_lengths), ("dilation_rates", dilation_rates))
    for name, values in given:
        whole = isinstance(values, Sequence) and not isinstance(values, str)
        positive = whole and len(values) > 0 and all(type(n) is int and n > 0 for n in values)
        require(positive, name, values, "a sequence of ints ≥ 1, one for each branch")
    got = f"{len(dilation_rates)} for {len(segment_lengths)} segment_lengths"
    require(len(segment_lengths) == len(dilation_rates), "dilation_rates", got, "one for each branch", show=str)
    return list(segment_lengths), list(dilation_rates)


def _signed(n: int) -> int:
    """The 64 bits of n as int64 has them."""
    return (n + 2**63) % 2**64 - 2**63


class Options(NamedTuple):
    """The arguments of the ops beside tensors; `training`: a backward follows."""

    segments: list[int]
    rates: list[int]
    mode: Mode
    causal: bool
    dropout_p: float
    deterministic: bool
    kernel: str | None
    training: bool
    manager: int

    @property
    def divisor(self) -> int:
        return len(self.rates) if self.mode == "head_groups" else 1


class Job(NamedTuple):
    """A call, its kernel in each direction, and the buffers it works in; `added`: an earlier branch has written there."""

    fwd: Selected
    bwd: Selected
    added: bool
    views: dict[str, View]  # of q, k, v, y, lse, dq, dk, dv
    forward_layout: Layout
    backward_layout: Layout
    part_layout: Layout  # o of an added call


class Plan(NamedTuple):
    """All jobs of a call. Both directions ask for buffers of the same size, so that a manager's serve each other."""

    branches: tuple[Branch, ...]
    jobs: tuple[Job, ...]
    temp_bytes: int
    part_bytes: int


_plans: dict[Signature, Plan] = {}


def _plan(qkv: Sequence[Tensor], y: Tensor, lse: Tensor, options: Options) -> Plan:
    """Kept under all that it depends on."""
    forms = [(x.shape, x.stride(), x.data_ptr() % ALIGNED_BYTES) for x in (*qkv, y)]
    patterns = (tuple(options.segments), tuple(options.rates), *options[2:-1])
    key = (*forms, y.dtype, y.device, patterns, torch.get_num_threads(), id(table.ATTENTION))
    found = _plans.get(key)
    return found if found is not None else remember(_plans, key, _new_plan(qkv, y, lse, options))


def _new_plan(qkv: Sequence[Tensor], y: Tensor, lse: Tensor, options: Options) -> Plan:
    if not qkv[0].numel() or not y.numel():
        return Plan((), (), 0, 0)
    b, h, t, _ = y.shape
    strides = tuple([x.stride()[:3] for x in (*qkv, y)])
    found = branches((b, h, t), strides, tuple(options.segments), tuple(options.rates), options.mode)
    jobs = []
    for number, branch in enumerate(found):
        added = options.mode == "longnet" and number > 0
        jobs += [_job(call, qkv, y, lse, options, added=added) for call in branch.calls]
    temp = max(job.forward_layout.nbytes for job in jobs)
    if options.training:
        temp = max(temp, *(job.backward_layout.nbytes for job in jobs))
    return Plan(found, tuple(jobs), temp, max(job.part_layout.nbytes for job in jobs))


def _job(call: StridedCall, qkv: Sequence[Tensor], y: Tensor, lse: Tensor, options: Options, *, added: bool) -> Job:
    q, k, v = (call.of(x) for x in qkv)
    mask = Mask(options.causal, dropout_p=options.dropout_p, seed=0 if options.dropout_p else None)
    fwd = select_fwd(q, k, v, mask, o=None, lse=None, kernel=options.kernel)
    bwd = select_bwd(q, k, v, mask, NO_OTHERS, kernel=options.kernel, deterministic=options.deterministic)
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
    return Job(fwd, bwd, added, views, Layout(forward), Layout(backward), Layout(part))


def _widened(y: View, d: int) -> View:
    """The same rows of a tensor in y's order, of d columns."""
    *shape, dv = y.shape
    return View((*shape, d), (*(n // dv * d for n in y.strides[:3]), 1), y.start // dv * d)


def _masks(options: Options, seed: Tensor | None, calls: int) -> list[Mask]:
    """Of each call: with dropout each has a seed of its own."""
    if seed is None:
        return [Mask(options.causal)] * calls
    seeds = (seed + _signed(number * WEYL) if number else seed for number in range(calls))
    return [Mask(options.causal, dropout_p=options.dropout_p, seed=own) for own in seeds]


def _in_order_of(q: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A new (B, H, T, …) in q's memory order: (B, T, H, …) where heads lie closer than positions."""
    b, h, t, *rest = shape
    if q.stride(1) < q.stride(2):
        return q.new_empty((b, t, h, *rest), dtype=dtype).transpose(1, 2)
    return q.new_empty(tuple(shape), dtype=dtype)


def _new_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    y = _in_order_of(q, (*q.shape[:3], v.shape[3]), q.dtype)
    return y, _in_order_of(q, q.shape[:3], lse_dtype(q.dtype))


def _new_gradients(q: Tensor, k: Tensor, v: Tensor, wanted: Sequence[bool]) -> list[Tensor]:
    given = zip((q, k, v), wanted, strict=True)
    return [_in_order_of(q, x.shape, q.dtype) if want else q.new_empty(0) for x, want in given]


def _zero_where_uncovered(plan: Plan, options: Options, *tensors: Tensor) -> None:
    """Zeros in the heads of branches that leave positions out; of "longnet" the first branch covers the most."""
    for branch in plan.branches[:1] if options.mode == "longnet" else plan.branches:
        if not branch.covers_all:
            for x in tensors:
                x[:, branch.heads.start : branch.heads.stop].zero_()


def _fwd(q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, *given: Any) -> tuple[Tensor, Tensor]:
    options = Options(*given)
    y, lse = _new_outputs(q, v)
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


def _run_forward(job: Job, given: dict[str, Tensor], mask: Mask, factor: float, temp: Tensor, part: Tensor) -> None:
    scratch = job.forward_layout.of(temp)
    q, k, v, o, lse = (job.views[name].of(x) for name, x in given.items())
    if not job.added:
        job.fwd.module.fwd(q, k, v, mask, o=o, lse=lse, scratch=of("attention", scratch))
        if factor != 1.0:
            o *= factor
        return
    part_o, part_lse = job.part_layout.of(part)["o"], scratch["lse"]
    job.fwd.module.fwd(q, k, v, mask, o=part_o, lse=part_lse, scratch=of("attention", scratch))
    mix_fwd(part_o, part_lse, o=o, lse=lse, scratch=of("mix", scratch))


def _bwd(
    q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, dy: Tensor, seed: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    *given, wanted = rest
    options = Options(*given)
    grads = _new_gradients(q, k, v, wanted)
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
    job.bwd.module.bwd(
        q, k, v, o, lse, do, None, mask, dbias=None, dsinks=None, scratch=of("attention", scratch),
        deterministic=options.deterministic,
        **{name: grads.get(name) if not job.added else scratch.get(name) for name in ("dq", "dk", "dv")},
    )  # fmt: skip
    if job.added:
        for name, x in grads.items():
            x += scratch[name]


_OPTIONS = (
    "Tensor? seed, int[] segment_lengths, int[] dilation_rates, str mode, bool causal, float dropout_p, bool deterministic, "
    "str? kernel, bool training, int manager"
)
_library = torch.library.Library("tilegrad", "FRAGMENT")
_library.define(f"dilated_fwd(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor y, Tensor lse)")
_library.define(
    f"dilated_bwd(Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor dy, {_OPTIONS}, bool[] wanted) "
    "-> (Tensor dq, Tensor dk, Tensor dv)"
)


def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return _new_outputs(q, v)


def _bwd_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(_new_gradients(q, k, v, rest[-1]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.options = inputs[4:]


def _backward(ctx: Any, dy: Tensor | None, _dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
    q, k, v, seed, y, lse = ctx.saved_tensors
    none = (None,) * len(ctx.needs_input_grad)
    if dy is None:
        return none
    wanted = list(ctx.needs_input_grad[:3])
    call: Callable[..., Any] = torch.ops.tilegrad.dilated_bwd
    if torch._C._are_functorch_transforms_active():
        call = _DilatedBackward.apply
    elif not torch.is_grad_enabled() and not _observed() and _plain(q, k, v, y, lse, dy, seed):
        call = _bwd
    grads = call(q, k, v, y, lse, dy, seed, *ctx.options, wanted)
    dq, dk, dv = (g if want else None for g, want in zip(grads, wanted, strict=True))
    return (dq, dk, dv, *none[3:])


def _no_second_derivative(*_: Any) -> tuple[None, ...]:
    raise NotImplementedError(
        "tilegrad.dilated_attention has no second derivative; call backward or grad without create_graph=True"
    )


def _no_forward_mode(*_: Any) -> NoReturn:
    raise NotImplementedError("tilegrad.dilated_attention has no forward-mode derivative; use reverse mode")


class _Eager(torch.autograd.Function):
    """Both directions without the dispatcher: plain tensors, no mode, no transform."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, options: Options) -> Tensor:
        y, lse = _fwd(q, k, v, seed, *options)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, seed, y, lse)
        ctx.options = options
        return y

    backward = staticmethod(_backward)


class _Dilated(torch.autograd.Function):
    """dilated_fwd as torch.func's transforms take it."""

    generate_vmap_rule = True
    forward = staticmethod(lambda *arguments: torch.ops.tilegrad.dilated_fwd(*arguments))
    setup_context = staticmethod(_save)
    backward = staticmethod(_backward)
    jvp = staticmethod(_no_forward_mode)  # type: ignore[assignment]  # torch's own names a ctx


class _DilatedBackward(torch.autograd.Function):
    """dilated_bwd likewise."""

    generate_vmap_rule = True
    forward = staticmethod(lambda *arguments: torch.ops.tilegrad.dilated_bwd(*arguments))
    setup_context = staticmethod(lambda ctx, inputs, output: None)  # noqa: ARG005
    backward = staticmethod(_no_second_derivative)  # type: ignore[assignment]
    jvp = staticmethod(_no_forward_mode)  # type: ignore[assignment]  # torch's own names a ctx


def _vmap(op: Callable[..., Any], tensors: int) -> Callable[..., Any]:
    """The batching rule of an op whose first `tensors` arguments have a dimension B at 0: samples are folded into B. With a
    seed each sample is a call, so that all drop alike where the seed is one, and by their own where each has one."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        n, seed = info.batch_size, arguments[tensors]
        in_dims = tuple(d if isinstance(d, int) else None for d in in_dims)  # a list of numbers has a list of None
        first = [x if d is None else x.movedim(d, 0) for x, d in zip(arguments, in_dims, strict=True)]
        if seed is None:
            own = [
                (x.expand(n, *x.shape) if d is None else x).flatten(0, 1)
                for x, d in zip(first[:tensors], in_dims, strict=False)
            ]
            results = op(*own, *arguments[tensors:])
            found = tuple(x.unflatten(0, (n, -1)) if x.ndim > 1 else x.expand(n, *x.shape) for x in results)
            return found, (0,) * len(found)
        calls = [op(*(x if d is None else x[i] for x, d in zip(first, in_dims, strict=True))) for i in range(n)]
        return tuple(map(torch.stack, zip(*calls, strict=True))), (0,) * len(calls[0])

    return rule


def _cast_under_autocast(device_type: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def call(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        dtype = torch.get_autocast_dtype(device_type)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
        with torch.autocast(device_type, enabled=False):
            return torch.ops.tilegrad.dilated_fwd(q, k, v, *rest)  # type: ignore[no-any-return]

    return call


for _device in ("CPU", "CUDA"):
    _library.impl("dilated_fwd", _fwd, _device)
    _library.impl("dilated_bwd", _bwd, _device)
    _library.impl("dilated_fwd", _cast_under_autocast(_device.lower()), f"Autocast{_device}")
torch.library.register_fake("tilegrad::dilated_fwd", _fwd_fake, lib=_library)
torch.library.register_fake("tilegrad::dilated_bwd", _bwd_fake, lib=_library)
torch.library.register_autograd("tilegrad::dilated_fwd", _backward, setup_context=_save, lib=_library)
torch.library.register_autograd("tilegrad::dilated_bwd", _no_second_derivative, lib=_library)
torch.library.register_vmap("tilegrad::dilated_fwd", _vmap(torch.ops.tilegrad.dilated_fwd, 3), lib=_library)
torch.library.register_vmap("tilegrad::dilated_bwd", _vmap(torch.ops.tilegrad.dilated_bwd, 6), lib=_library)
