"""How a call of attention reaches its kernel: at once where nothing stands between, else through torch's dispatcher.

    known    eager/eager.cpp, from here to the kernel and back in C++     plain tensors on a CPU, no others than q, k and v, no
             where it was built                                           mode, no transform, a signature that ran before
    eager    an autograd.Function around the kernel                       plain tensors, no mode, no transform
    op       tilegrad::attention_fwd(q, k, v, …mask) → (o, lse)           compile, export, fake tensors, subclasses,
             tilegrad::attention_bwd(q, k, v, o, lse, do, dlse, …mask)    dispatch and function modes, torch.func, tracing
                 → (dq, dk, dv, dbias, dsinks)

The last two check, allocate and run by the same two functions, `_forward` and `_backward`. Of a small call the dispatcher takes
most of the time, and then Python: hence the others. What a call allocates is worked out once for each signature, and its kernel
is prepared for it: from call to call addresses change. All scratch of a call is one buffer. The bits are the same either way.

A mask travels through an op as the flat list of its fields, because a schema knows only tensors and numbers. torch.func's
transforms see an autograd.Function around each op: grad and jacrev run its backward, vmap folds its dimension into B, or
calls once for each sample where a mask's tensor has that dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._device import DeviceContext

from .eager import load
from .kernels.attention import table
from .kernels.attention.api import Selected, Signature, forget, recall, select_bwd, select_fwd, signature
from .kernels.attention.checks import check_lengths, check_options, check_tensors
from .kernels.attention.mask import Mask
from .kernels.attention.problem import lse_dtype, output_shapes, rows_aligned
from .kernels.scratch import Layout

_PLAIN = frozenset((Tensor, Parameter))
_DEVICES = frozenset(("cpu", "cuda"))
_is_batched = torch._C._functorch.is_legacy_batchedtensor
_known: ModuleType | None = None  # eager.cpp


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, return_lse: bool, deterministic: bool | None, kernel: str | None
) -> Tensor | tuple[Tensor, Tensor]:
    """o, or (o, lse), differentiable."""
    if not torch.compiler.is_compiling() and _known is not None and mask.bare:
        known = _known.attend(q, k, v, mask.numbers, kernel, table.ATTENTION, deterministic, return_lse)
        if known is not None:
            return known  # type: ignore[no-any-return]
    seed = mask.seed
    if mask.dropout_p or seed is not None:
        check_options(q, k, v, mask)
        seed = _seed_tensor(mask, q.device)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if not _observed():
        mask = mask if seed is mask.seed else replace(mask, seed=seed)
        held = (
            () if mask.bare else (mask.bias, mask.alibi_slopes, mask.sinks, seed, mask.cu_seqlens_q, mask.cu_seqlens_k)
        )
        autocast = torch._C._is_any_autocast_enabled()
        key = None if autocast else _forward_key(q, k, v, mask, kernel)
        if key is not None and (q.is_cuda or q.is_cpu) or _plain(q, k, v, *held):
            if autocast:
                q, k, v = _cast(q, k, v)
                key = _forward_key(q, k, v, mask, kernel)
            if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or _learned(mask)):
                call = (mask, key, return_lse, deterministic, kernel)
                return _apply_eagerly(call, q, k, v, *held)  # type: ignore[no-any-return]
            o, lse = _forward(q, k, v, mask, kernel, key)
            return (o, lse) if return_lse else o
    return _attend_by_op(q, k, v, mask, seed, return_lse=return_lse, deterministic=deterministic, kernel=kernel)


def _learned(mask: Mask) -> bool:
    return not mask.bare and any(x is not None and x.requires_grad for x in (mask.bias, mask.sinks))


def _attend_by_op(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, seed: Tensor | None, *,
    return_lse: bool, deterministic: bool, kernel: str | None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    check_options(q, k, v, mask)
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(x).tangent is not None for x in (q, k, v, *mask.tensors)
    ):
        _no_forward_mode()
    held = (mask.bias, mask.alibi_slopes, mask.sinks, seed, mask.cu_seqlens_q, mask.cu_seqlens_k)
    arguments = (q, k, v, *held, *_options(mask), deterministic, kernel)
    if torch._C._are_functorch_transforms_active():
        if torch.compiler.is_compiling():
            _keep_in_graph()
        o, lse = _transformed(*arguments)
    else:
        o, lse = torch.ops.tilegrad.attention_fwd(*arguments)
    return (o, lse) if return_lse else o


def _seed_tensor(mask: Mask, device: torch.device) -> Tensor | None:
    """Drawn where dropout has no seed; an int where nothing is dropped is left out."""
    seed = mask.seed
    if seed is None and mask.dropout_p:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)
    if isinstance(seed, int):
        signed = seed - 2**64 if seed >= 2**63 else seed
        return torch.full((), signed, dtype=torch.int64, device=device) if mask.dropout_p else None
    return seed


def _observed() -> bool:
    """Whether something wants to see the op: a compiler, a transform, a mode, a tracer, forward-mode AD."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_tracing()
        or forward_ad._current_level >= 0
        or torch._C._len_torch_function_stack()
        and not all(type(mode) is DeviceContext for mode in torch.overrides._get_current_function_mode_stack())
    )


def _plain(q: Any, *others: Any) -> bool:
    """Whether tensors are what they hold in memory: no subclass, no fake one, none with a negation to come, no zeros without
    memory."""
    for x in (q, *others):
        if x is not None and (type(x) not in _PLAIN or x.is_neg() or x._is_zerotensor()):
            return False
    return q.device.type in _DEVICES


_FIELDS = (
    "Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, Tensor? seed, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, bool causal, int? left, int? right, float? scale, float softcap, "
    "float dropout_p"
)
_library = torch.library.Library("tilegrad", "DEF")
_library.define(
    f"attention_fwd(Tensor q, Tensor k, Tensor v, {_FIELDS}, bool deterministic, str? kernel) -> (Tensor o, Tensor lse)"
)
_library.define(
    "attention_bwd(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor do, Tensor? dlse, "
    f"{_FIELDS}, bool deterministic, str? kernel, bool[] wanted) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)"
)


def _options(mask: Mask) -> tuple[Any, ...]:
    """The numbers among _FIELDS."""
    left, right = mask.window or (None, None)
    longest = mask.max_seqlen_q, mask.max_seqlen_k
    return (*longest, mask.causal, left, right, mask.scale, mask.softcap, mask.dropout_p)


def _mask(*fields: Any) -> Mask:
    """The mask of an op's arguments, which are in the order of _FIELDS."""
    (
        bias, alibi_slopes, sinks, seed, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        causal, left, right, scale, softcap, dropout_p,
    ) = fields  # fmt: skip
    return Mask(
        causal, (left, right), scale, softcap, bias, alibi_slopes, sinks, dropout_p, seed,
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip


def _new_outputs(q: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """o in q's memory order, so that a transposed view of (B, T, H, D) gives one back; lse contiguous."""
    o_shape, lse_shape = output_shapes(q, v, mask)
    if len(o_shape) == 4 and q.stride(1) < q.stride(2):
        _, h, t, d = o_shape
        o = q.new_empty_strided(o_shape, (t * h * d, d, h * d, 1))  # no view: it may be changed in place
    else:
        o = q.new_empty(o_shape)
    return o, q.new_empty(lse_shape, dtype=lse_dtype(q.dtype))


GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")


def _new_gradients(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """GRADIENTS, None for those not wanted."""
    want_q, want_k, want_v, want_bias, want_sinks = wanted
    return (
        torch.empty_like(q) if want_q else None,
        torch.empty_like(k) if want_k else None,
        torch.empty_like(v) if want_v else None,
        torch.empty_like(mask.float_bias) if want_bias and mask.float_bias is not None else None,
        torch.zeros_like(mask.sinks) if want_sinks and mask.sinks is not None else None,  # it accumulates
    )


def _as_tensors(q: Tensor, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """The same as an op returns them: empty where None."""
    return tuple(q.new_empty(0) if x is None else x for x in gradients)


def _forward_key(q: Tensor, k: Tensor, v: Tensor, mask: Mask, kernel: str | None) -> Signature | None:
    return signature(("new", kernel, torch.get_num_threads()), (q, k, v), mask)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, kernel: str | None, key: Signature | None
) -> tuple[Tensor, Tensor]:
    """Checks, allocates, runs: o, lse. `key`: of `_forward_key`."""
    selected, device = recall(key), q.device
    if selected is None:
        selected = select_fwd(q, k, v, mask, o=None, lse=None, kernel=kernel)
        o, lse = _new_outputs(q, v, mask)
        work = _new_work(Layout(selected.scratch).nbytes, device)
        selected = selected.prepared(key, "fwd", (o, lse), work, q, k, v, mask, o=o, lse=lse)
        _make_known(selected, key, (q, k, v), mask, (o, lse), kernel)
    else:
        (shape, strides, dtype), (lse_shape, lse_strides, lse_type) = selected.forms
        like_q = selected.o_like_q
        o = torch.empty_like(q) if like_q else torch.empty_strided(shape, strides, dtype=dtype, device=device)
        lse = torch.empty_strided(lse_shape, lse_strides, dtype=lse_type, device=device)
        work = _new_work(selected.work_bytes, device)
    if mask.varlen:
        check_lengths(q, k, mask)
    if selected.run is None:
        selected.module.fwd(q, k, v, mask, o=o, lse=lse, scratch=Layout(selected.scratch).of(work))
    else:
        held = () if mask.bare else mask.tensors
        selected.run((q, k, v, o, lse, *held, work), mask)
    return o, lse


def _make_known(
    selected: Selected, key: Signature | None, reads: tuple[Tensor | None, ...], mask: Mask,
    new: tuple[Tensor | None, ...], kernel: str | None, *, deterministic: bool = False,
) -> None:  # fmt: skip
    """Calls of this signature go by C++ from now on, where it is there and takes them."""
    q, run = reads[0], selected.run
    if _known is None or key is None or not mask.bare or run is None or q is None:
        return
    native = getattr(run, "native", None)
    if native is None:
        return
    wanted = sum(1 << i for i, x in enumerate(new) if x is not None)
    if _known.add_program(
        mask, mask.numbers, kernel, selected.table, deterministic, wanted, reads, new, selected.work_bytes, native
    ):
        forget()


def _new_work(size: int, device: torch.device) -> Tensor:
    """One buffer for all scratch of a call."""
    return torch.empty_strided((size,), (1,), dtype=torch.uint8, device=device) if size else _no_work(device)


@functools.cache
def _no_work(device: torch.device) -> Tensor:
    """Of kernels that need none."""
    return torch.empty(0, dtype=torch.uint8, device=device)


def _backward_key(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, mask: Mask,
    wanted: tuple[bool, ...], kernel: str | None, deterministic: bool,  # noqa: FBT001
) -> Signature | None:  # fmt: skip
    call = ("new", kernel, deterministic, torch.get_num_threads(), wanted)
    return signature(call, (q, k, v, o, lse, do, dlse), mask)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, mask: Mask,
    wanted: tuple[bool, ...], kernel: str | None, deterministic: bool, key: Signature | None,  # noqa: FBT001
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Checks, allocates, runs: dq, dk, dv, dbias, dsinks, None for those not wanted. `key`: of `_backward_key`."""
    selected, device = recall(key), q.device
    if selected is None and not rows_aligned(do):  # not every kernel can read it; what is remembered is read as it is
        do = do.clone(memory_format=torch.contiguous_format)
        key = _backward_key(q, k, v, o, lse, do, dlse, mask, wanted, kernel, deterministic)
        selected = recall(key)
    gradients = dq, dk, dv, dbias, dsinks = _new_gradients(q, k, v, mask, wanted)
    if selected is None:
        named = dict(zip(GRADIENTS, gradients, strict=True))
        others = {"o": o, "lse": lse, "do": do, "dlse": dlse, **named}
        selected = select_bwd(q, k, v, mask, others, kernel=kernel, deterministic=deterministic)
        work = _new_work(Layout(selected.scratch).nbytes, device)
        reads = (q, k, v, o, lse, do, dlse, mask)
        selected = selected.prepared(key, "bwd", (), work, *reads, **named, deterministic=deterministic)
        _make_known(selected, key, reads[:7], mask, (dq, dk, dv), kernel, deterministic=deterministic)
    else:
        work = _new_work(selected.work_bytes, device)
    if mask.varlen:
        check_lengths(q, k, mask)
    if selected.run is None:
        selected.module.bwd(
            q, k, v, o, lse, do, dlse, mask, dq=dq, dk=dk, dv=dv, dbias=dbias, dsinks=dsinks,
            scratch=Layout(selected.scratch).of(work), deterministic=deterministic,
        )  # fmt: skip
    else:
        held = () if mask.bare else mask.tensors
        given = (q, k, v, o, lse, do, dlse, *held, dq, dk, dv, dbias, dsinks, work)
        selected.run([x for x in given if x is not None], mask)
    return gradients


def _fwd(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *fields, _, kernel = rest
    mask = _mask(*fields)
    return _forward(q, k, v, mask, kernel, _forward_key(q, k, v, mask, kernel))


def _bwd(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    *fields, deterministic, kernel, wanted = rest
    mask, wanted = _mask(*fields), tuple(wanted)
    key = _backward_key(q, k, v, o, lse, do, dlse, mask, wanted, kernel, deterministic)
    return _as_tensors(q, _backward(q, k, v, o, lse, do, dlse, mask, wanted, kernel, deterministic, key))


def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    mask = _mask(*rest[:-2])
    check_tensors(q, k, v, mask)
    return _new_outputs(q, v, mask)


def _bwd_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    _, _, _, _, *fields, _, _, wanted = rest  # o, lse, do, dlse; deterministic, kernel
    return _as_tensors(q, _new_gradients(q, k, v, _mask(*fields), wanted))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:9], *output)
    ctx.options = inputs[9:]


def _attention_backward(ctx: Any, do: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """Of the op."""
    q, k, v, *held, o, lse = ctx.saved_tensors
    *numbers, deterministic, kernel = ctx.options
    need_q, need_k, need_v, need_bias, _, need_sinks = ctx.needs_input_grad[:6]
    none = (None,) * (len(ctx.needs_input_grad) - 6)
    if do is None and dlse is None:
        return (None,) * 6 + none
    saved = (q, k, v, o, lse, torch.zeros_like(o) if do is None else do, dlse)
    wanted = (need_q, need_k, need_v, need_bias, need_sinks)
    dq, dk, dv, dbias, dsinks = _backward_by_op(saved, (*held, *numbers, deterministic, kernel), wanted)
    return (dq, dk, dv, dbias, None, dsinks, *none)


def _backward_by_op(
    saved: tuple[Tensor | None, ...], options: tuple[Any, ...], wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    transformed = torch._C._are_functorch_transforms_active()
    call = _AttentionBackward.apply if transformed else torch.ops.tilegrad.attention_bwd
    grads = call(*saved, *options, list(wanted))
    return tuple(g if want else None for g, want in zip(grads, wanted, strict=True))


def _no_second_derivative(*_: Any) -> tuple[None, ...]:
    raise NotImplementedError(
        "tilegrad attention has no second derivative: its backward is not differentiable; "
        "call backward or grad without create_graph=True"
    )


def _no_forward_mode(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "tilegrad attention has no forward-mode derivative (torch.func.jvp, jacfwd, hessian, dual tensors); "
        "use reverse mode: backward, torch.func.grad, vjp or jacrev"
    )


class _EagerAttention(torch.autograd.Function):
    """A kernel and its backward, without the dispatcher. Of a call without tensors beside q, k and v: apply(call, q, k, v);
    else bias, alibi_slopes, sinks, seed, cu_seqlens_q and cu_seqlens_k stand behind them."""

    @staticmethod
    def forward(ctx: Any, call: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, *held: Tensor | None) -> Any:
        mask, key, return_lse, deterministic, kernel = call
        o, lse = _forward(q, k, v, mask, kernel, key)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, o, lse, *held)
        ctx.options = (_options(mask) if held else mask, deterministic, kernel)  # tensors are kept by autograd alone
        return (o, lse) if return_lse else o

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None = None) -> Any:
        q, k, v, o, lse, *held = ctx.saved_tensors
        mask, deterministic, kernel = ctx.options
        if not held:
            _, need_q, need_k, need_v = ctx.needs_input_grad
            wanted = (need_q, need_k, need_v, False, False)
        else:
            _, need_q, need_k, need_v, need_bias, _, need_sinks, *_ = ctx.needs_input_grad
            wanted = (need_q, need_k, need_v, need_bias, need_sinks)
        if do is None:
            if dlse is None:
                return (None,) * len(ctx.needs_input_grad)
            do = torch.zeros_like(o)
        mask = _mask(*held, *mask) if held else mask
        reads = (q, k, v, o, lse, do, dlse)
        dq, dk, dv, dbias, dsinks = _backward_of_eager(reads, mask, wanted, kernel, deterministic)
        return (None, dq, dk, dv, dbias, None, dsinks, None, None, None) if held else (None, dq, dk, dv)


def _backward_of_eager(
    reads: Sequence[Any], mask: Mask, wanted: tuple[bool, ...], kernel: str | None, deterministic: bool  # noqa: FBT001
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """At once where nothing stands between, else by the op. `wanted` of q, k and v, or of GRADIENTS."""
    q, k, v, o, lse, do, dlse = reads
    wanted = wanted if len(wanted) == len(GRADIENTS) else (*wanted, False, False)
    held = (mask.bias, mask.alibi_slopes, mask.sinks, mask.seed, mask.cu_seqlens_q, mask.cu_seqlens_k)
    batched = _is_batched(do) or dlse is not None and _is_batched(dlse)  # torch.autograd.grad(…, is_grads_batched=True)
    if not batched and not torch.is_grad_enabled() and not _observed():
        key = _backward_key(q, k, v, o, lse, do, dlse, mask, wanted, kernel, deterministic)
        if key is not None or _plain(q, k, v, o, lse, do, dlse, *held):
            return _backward(q, k, v, o, lse, do, dlse, mask, wanted, kernel, deterministic, key)
    return _backward_by_op(tuple(reads), (*held, *_options(mask), deterministic, kernel), wanted)


def take_known() -> None:
    """Known calls go by C++ from now on, where it was built."""
    global _known
    found = load()
    _known = None if isinstance(found, str) else found
    if _known is not None:
        _known.use(Parameter, _backward_of_eager)


take_known()


_apply_eagerly = super(torch.autograd.Function, _EagerAttention).apply  # Function's own looks for transforms first


class _Attention(torch.autograd.Function):
    """attention_fwd as torch.func's transforms take it."""

    generate_vmap_rule = True
    forward = staticmethod(lambda *arguments: torch.ops.tilegrad.attention_fwd(*arguments))
    setup_context = staticmethod(_save)
    backward = staticmethod(_attention_backward)
    jvp = staticmethod(_no_forward_mode)  # type: ignore[assignment]  # torch's own names a ctx


class _AttentionBackward(torch.autograd.Function):
    """attention_bwd likewise."""

    generate_vmap_rule = True
    forward = staticmethod(lambda *arguments: torch.ops.tilegrad.attention_bwd(*arguments))
    setup_context = staticmethod(lambda ctx, inputs, output: None)  # noqa: ARG005
    backward = staticmethod(_no_second_derivative)  # type: ignore[assignment]
    jvp = staticmethod(_no_forward_mode)  # type: ignore[assignment]  # torch's own names a ctx


def _transformed(*arguments: Any) -> Any:
    return _Attention.apply(*arguments)


def _keep_in_graph() -> None:
    """Have torch.compile call `_transformed` as it is, which can't be traced. It runs while tracing, for to say so at import
    would load torch's compiler: 1.6 s."""
    torch.compiler.allow_in_graph(_transformed)


_keep_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result does


def batching_rule(op: Callable[..., Any], tensors: int, folds: Callable[..., bool]) -> Callable[..., Any]:
    """vmap of an op whose first `tensors` arguments have a dimension B at 0, or are None: samples are folded into B where
    folds(in_dims, arguments), else each is a call."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        n = info.batch_size
        in_dims = tuple(d if isinstance(d, int) else None for d in in_dims)  # a list of numbers has a list of None
        first = [x if d is None else x.movedim(d, 0) for x, d in zip(arguments, in_dims, strict=True)]
        if folds(in_dims, arguments):
            own = [
                x if x is None else (x.expand(n, *x.shape) if d is None else x).flatten(0, 1)
                for x, d in zip(first[:tensors], in_dims, strict=False)
            ]
            results = op(*own, *arguments[tensors:])
            found = tuple(x.unflatten(0, (n, -1)) if x.ndim > 1 else x.expand(n, *x.shape) for x in results)
            return found, (0,) * len(found)
        calls = [op(*(x if d is None else x[i] for x, d in zip(first, in_dims, strict=True))) for i in range(n)]
        return tuple(map(torch.stack, zip(*calls, strict=True))), (0,) * len(calls[0])

    return rule


def _vmap(op: Callable[..., Any], tensors: int) -> Callable[..., Any]:
    """Samples are folded where q, k and v are each sample's own, and no tensor of the mask nor its gradient is."""

    def folds(in_dims: tuple[Any, ...], arguments: tuple[Any, ...]) -> bool:
        bias, alibi_slopes, sinks, seed, cu_seqlens_q = arguments[tensors : tensors + 5]
        shared = (bias is None or bias.ndim < 4 or bias.shape[0] == 1) and (
            alibi_slopes is None or alibi_slopes.ndim == 1
        )
        shared &= all(d is None for d in in_dims[tensors:]) and sinks is None and seed is None and cu_seqlens_q is None
        summed = tensors > 3 and any(arguments[-1][3:])  # dbias
        return None not in in_dims[:3] and shared and not summed

    return batching_rule(op, tensors, folds)


def _cast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """To the autocast dtype of q's device, where autocast is on there; float64 stays."""
    device_type = q.device.type
    if not torch.is_autocast_enabled(device_type):
        return q, k, v
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))


def _fwd_under_autocast(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    q, k, v = _cast(q, k, v)
    with torch.autocast(q.device.type, enabled=False):
        return torch.ops.tilegrad.attention_fwd(q, k, v, *rest)  # type: ignore[no-any-return]


for _device in ("CPU", "CUDA"):
    _library.impl("attention_fwd", _fwd, _device)
    _library.impl("attention_bwd", _bwd, _device)
    _library.impl("attention_fwd", _fwd_under_autocast, f"Autocast{_device}")
torch.library.register_fake("tilegrad::attention_fwd", _fwd_fake, lib=_library)
torch.library.register_fake("tilegrad::attention_bwd", _bwd_fake, lib=_library)
torch.library.register_autograd("tilegrad::attention_fwd", _attention_backward, setup_context=_save, lib=_library)
torch.library.register_autograd("tilegrad::attention_bwd", _no_second_derivative, lib=_library)
torch.library.register_vmap("tilegrad::attention_fwd", _vmap(torch.ops.tilegrad.attention_fwd, 3), lib=_library)
torch.library.register_vmap("tilegrad::attention_bwd", _vmap(torch.ops.tilegrad.attention_bwd, 7), lib=_library)
