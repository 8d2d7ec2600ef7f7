"""Attention for autograd: it checks, allocates, registers with torch.library, and calls the kernel.

    tilegrad::attention_fwd(q, k, v, …mask) → (o, lse)
    tilegrad::attention_bwd(q, k, v, o, lse, do, dlse, …mask) → (dq, dk, dv, dbias, dsinks)

A mask travels as the flat list of its fields, because an op's schema knows only tensors and numbers. Under autocast q, k
and v are cast to the autocast dtype; bias, slopes and sinks keep theirs. Second derivatives and forward-mode AD raise.

torch.func's transforms see an autograd.Function around each op: grad and jacrev run its backward, vmap folds its dimension
into B, or calls once for each sample where a mask's tensor has that dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .kernels.attention import table
from .kernels.attention.api import select_bwd, select_fwd
from .kernels.attention.checks import check_lengths, check_options, check_tensors, require
from .kernels.attention.mask import Mask, Window
from .kernels.attention.problem import Problem, lse_dtype, output_shapes, rows_aligned
from .kernels.scratch import new_scratch
from .kernels.table import Explanation


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: Window | None = None, scale: float | None = None,
    softcap: float = 0.0, bias: Tensor | None = None, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
    dropout_p: float = 0.0, seed: int | Tensor | None = None, return_lse: Literal[False] = False,
    deterministic: bool | None = None, kernel: str | None = None,
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: Window | None = None, scale: float | None = None,
    softcap: float = 0.0, bias: Tensor | None = None, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
    dropout_p: float = 0.0, seed: int | Tensor | None = None, return_lse: Literal[True],
    deterministic: bool | None = None, kernel: str | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: Window | None = None, scale: float | None = None,
    softcap: float = 0.0, bias: Tensor | None = None, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
    dropout_p: float = 0.0, seed: int | Tensor | None = None, return_lse: bool,
    deterministic: bool | None = None, kernel: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: Window | None = None, scale: float | None = None,
    softcap: float = 0.0, bias: Tensor | None = None, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
    dropout_p: float = 0.0, seed: int | Tensor | None = None, return_lse: bool = False,
    deterministic: bool | None = None, kernel: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(scale · q kᵀ + …) v with exact gradients for q, k, v, bias, sinks, and through lse.

    q (B, Hq, Tq, D), k (B, Hkv, Tk, D), v (B, Hkv, Tk, Dv), any strides with the last one 1, Hq a multiple of Hkv; the
    result is (B, Hq, Tq, Dv), laid out in memory as q is. Scores go through these, in this order:

    scale         times q·k; None = 1/√D
    softcap       c > 0: s = c·tanh(s/c)
    bias          added; broadcastable to (B, Hq, Tq, Tk), float32 or q's dtype; bool: True = attends, without gradient
    alibi_slopes  − slope[h]·|i + Tk − Tq − j|; (Hq,) or (B, Hq), no gradient
    causal        query i attends to keys j ≤ i + Tk − Tq
    window        (left, right): i + Tk − Tq − left ≤ j ≤ i + Tk − Tq + right; None = open on that side
    sinks         (Hq,): one logit per head that joins the softmax's denominator and has no value
    dropout_p     drops weights after the softmax; which ones is a pure function of seed (an int, a 0-d int64 tensor
                  read on the device, or None = drawn from torch's generator), the same in every kernel

    A row that attends to no key gives 0. return_lse adds the natural-log logsumexp (B, Hq, Tq) in float32 (float64 for
    float64), differentiable. deterministic=True promises bit-equal results; None follows torch.use_deterministic_algorithms.
    kernel names a kernel, which runs or raises; `explain` says which would run and why.

    >>> import torch, tilegrad
    >>> q = torch.randn(1, 8, 128, 64, requires_grad=True)
    >>> k, v = torch.randn(2, 1, 2, 128, 64)
    >>> o, lse = tilegrad.attention(q, k, v, causal=True, window=(63, 0), return_lse=True)
    >>> o.shape, lse.shape
    (torch.Size([1, 8, 128, 64]), torch.Size([1, 8, 128]))
    >>> (o.square().sum() + lse.sum()).backward()
    """
    mask = Mask(causal, window, scale, softcap, bias, alibi_slopes, sinks, dropout_p, seed)
    return _call(q, k, v, mask, return_lse=return_lse, deterministic=deterministic, kernel=kernel)


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, *,
    causal: bool = False, window: Window | None = None, scale: float | None = None, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, dropout_p: float = 0.0,
    seed: int | Tensor | None = None, return_lse: Literal[False] = False, deterministic: bool | None = None,
    kernel: str | None = None,
) -> Tensor: ...  # fmt: skip


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, *,
    causal: bool = False, window: Window | None = None, scale: float | None = None, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, dropout_p: float = 0.0,
    seed: int | Tensor | None = None, return_lse: Literal[True], deterministic: bool | None = None,
    kernel: str | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, *,
    causal: bool = False, window: Window | None = None, scale: float | None = None, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, dropout_p: float = 0.0,
    seed: int | Tensor | None = None, return_lse: bool, deterministic: bool | None = None,
    kernel: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, *,
    causal: bool = False, window: Window | None = None, scale: float | None = None, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, dropout_p: float = 0.0,
    seed: int | Tensor | None = None, return_lse: bool = False, deterministic: bool | None = None,
    kernel: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`attention` over sequences packed end to end: q (total_q, Hq, D), k (total_k, Hkv, D), v (total_k, Hkv, Dv).

    Sequence b is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q and likewise of k and v (int32, on q's device); it may
    be empty. max_seqlen_* are the longest lengths. The result is (total_q, Hq, Dv), lse (Hq, total_q). The values of
    cu_seqlens are checked on the CPU, on a device only with TILEGRAD_CHECK=1 in the environment.

    >>> import torch, tilegrad
    >>> q, k, v = torch.randn(3, 10, 4, 32)
    >>> ends = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
    >>> tilegrad.attention_varlen(q, k, v, ends, ends, 7, 7, causal=True).shape
    torch.Size([10, 4, 32])
    """
    mask = Mask(
        causal, window, scale, softcap, None, alibi_slopes, sinks, dropout_p, seed,
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip
    return _call(q, k, v, mask, return_lse=return_lse, deterministic=deterministic, kernel=kernel)


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,  # noqa: FBT001, FBT002
) -> Tensor:  # fmt: skip
    """torch.nn.functional.scaled_dot_product_attention by tilegrad's kernels: its arguments, its meaning.

    query (…, Hq, L, E), key (…, H, S, E), value (…, H, S, Ev) → (…, Hq, L, Ev). Dimensions before the last two broadcast; with
    enable_gqa Hq is a multiple of H. attn_mask broadcasts to (…, Hq, L, S): bool, True = attends, or added to the scores.

    `attention` differs in two things. is_causal is aligned at the top left, row i attends to columns j ≤ i, where `attention`'s
    causal is aligned at the bottom right; for L = S they are one. And a dimension does not broadcast there.

    >>> import torch, tilegrad
    >>> q, k, v = torch.randn(3, 2, 4, 16, 32)
    >>> torch.allclose(tilegrad.sdpa(q, k, v, is_causal=True), tilegrad.attention(q, k, v, causal=True))
    True
    """
    given = (("query", query), ("key", key), ("value", value))
    for name, x in given:
        enough = x.ndim >= (3 if enable_gqa else 2)
        require(enough, name, f"shape {tuple(x.shape)}", "(…, L, E), with enable_gqa (…, H, L, E)", show=str)
    require(attn_mask is None or not is_causal, "attn_mask", "a mask and is_causal=True", "one of the two", show=str)
    dims = max(x.ndim for _, x in given)
    q, k, v = (x if x.ndim > 2 else x[None] for _, x in given)
    heads = torch.broadcast_shapes(*((x.shape[-3],) for x in (q, k, v))) if not enable_gqa else None
    batch = torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    q, k, v = (_rows(x.expand(*batch, *(heads or x.shape[-3:-2]), *x.shape[-2:])) for x in (q, k, v))
    bias, window, rows = attn_mask, None, q.shape[2]
    if bias is not None and bias.ndim > 3 and len(batch) != 1:
        bias = bias.expand(*batch, *bias.shape[-3:]).reshape(-1, *bias.shape[-3:])
    if is_causal:  # row i attends to columns j ≤ i: to the first L, at distances of Tk − Tq and more
        k, v = k[:, :, :rows], v[:, :, :rows]
        window = (None, rows - k.shape[2])
    o = attention(q, k, v, bias=bias, window=window, scale=scale, dropout_p=dropout_p)
    return o.reshape((*batch, *o.shape[1:])[-dims:])


def _rows(x: Tensor) -> Tensor:
    """(…, H, T, D) → (B, H, T, D) with contiguous rows, a view where there is one."""
    x = x if x.ndim == 4 else x.reshape(-1, *x.shape[-3:])
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def explain(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: Window | None = None, scale: float | None = None,
    softcap: float = 0.0, bias: Tensor | None = None, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
    dropout_p: float = 0.0, seed: int | Tensor | None = None, deterministic: bool | None = None,
    kernel: str | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int = 0, max_seqlen_k: int = 0,
) -> Explanation:  # fmt: skip
    """Which kernel would run this call of `attention` (or, with cu_seqlens, `attention_varlen`), and why not the others.

    `deterministic` is accepted so that a call can be copied; it changes nothing.

    >>> import torch, tilegrad
    >>> told = tilegrad.explain(*torch.randn(3, 1, 4, 16, 32), dropout_p=0.1, kernel="tiled")
    >>> told.kernel, told.reasons["tiled"]
    ('tiled', 'runs: asked for by name')
    """
    del deterministic
    mask = Mask(
        causal, window, scale, softcap, bias, alibi_slopes, sinks, dropout_p, seed if seed is not None else 0,
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip
    check_options(q, k, v, mask)
    check_tensors(q, k, v, mask)
    return table.ATTENTION.explain(Problem(q, k, v, mask), kernel)


def _call(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, return_lse: bool, deterministic: bool | None, kernel: str | None
) -> Tensor | tuple[Tensor, Tensor]:
    check_options(q, k, v, mask)
    seed = mask.seed
    if seed is None and mask.dropout_p:
        seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=q.device)
    elif isinstance(seed, int):
        signed = seed - 2**64 if seed >= 2**63 else seed
        seed = torch.full((), signed, dtype=torch.int64, device=q.device) if mask.dropout_p else None
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    left, right = mask.window or (None, None)
    arguments = (
        q, k, v, mask.bias, mask.alibi_slopes, mask.sinks, seed, mask.cu_seqlens_q, mask.cu_seqlens_k,
        mask.max_seqlen_q, mask.max_seqlen_k, mask.causal, left, right, mask.scale, mask.softcap, mask.dropout_p,
        deterministic, kernel,
    )  # fmt: skip
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(x).tangent is not None for x in (q, k, v, *mask.tensors)
    ):
        _no_forward_mode()
    transformed = torch._C._are_functorch_transforms_active()
    o, lse = _Attention.apply(*arguments) if transformed else torch.ops.tilegrad.attention_fwd(*arguments)
    return (o, lse) if return_lse else o


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
_GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")


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
        b, h, t, d = o_shape
        o = q.new_empty(b, t, h, d).transpose(1, 2)
    else:
        o = q.new_empty(o_shape)
    return o, q.new_empty(lse_shape, dtype=lse_dtype(q.dtype))


def _new_gradients(q: Tensor, k: Tensor, v: Tensor, mask: Mask, wanted: Sequence[bool]) -> list[Tensor]:
    """One tensor for each of dq, dk, dv, dbias, dsinks; empty ones for those not wanted."""
    like = (q, k, v, mask.float_bias, mask.sinks)
    new = [torch.empty_like] * 4 + [torch.zeros_like]  # dsinks accumulates
    return [
        make(x) if want and x is not None else q.new_empty(0) for make, x, want in zip(new, like, wanted, strict=True)
    ]


def _readable(do: Tensor) -> Tensor:
    """do with rows that every kernel can read; copied only where they are not."""
    return do if rows_aligned(do) else do.clone(memory_format=torch.contiguous_format)


def _fwd(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *fields, _, kernel = rest
    mask = _mask(*fields)
    selected = select_fwd(q, k, v, mask, o=None, lse=None, kernel=kernel)
    check_lengths(q, k, mask)
    o, lse = _new_outputs(q, v, mask)
    selected.module.fwd(q, k, v, mask, o=o, lse=lse, scratch=new_scratch(selected.scratch, q.device))
    return o, lse


def _bwd(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    *fields, deterministic, kernel, wanted = rest
    mask = _mask(*fields)
    grads = _new_gradients(q, k, v, mask, wanted)
    outputs = {name: x if want else None for name, x, want in zip(_GRADIENTS, grads, wanted, strict=True)}
    do = _readable(do)
    others = {"o": o, "lse": lse, "do": do, "dlse": dlse, **outputs}
    selected = select_bwd(q, k, v, mask, others, kernel=kernel, deterministic=deterministic)
    check_lengths(q, k, mask)
    scratch = new_scratch(selected.scratch, q.device)
    selected.module.bwd(q, k, v, o, lse, do, dlse, mask, **outputs, scratch=scratch, deterministic=deterministic)
    return tuple(grads)


def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    mask = _mask(*rest[:-2])
    check_tensors(q, k, v, mask)
    return _new_outputs(q, v, mask)


def _bwd_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    _, _, _, _, *fields, _, _, wanted = rest  # o, lse, do, dlse; deterministic, kernel
    return tuple(_new_gradients(q, k, v, _mask(*fields), wanted))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:9], *output)
    ctx.options = inputs[9:]


def _attention_backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, bias, alibi_slopes, sinks, seed, cu_q, cu_k, o, lse = ctx.saved_tensors
    none = (None,) * (9 + len(ctx.options))
    if do is None and dlse is None:
        return none
    need_q, need_k, need_v, need_bias, _, need_sinks = ctx.needs_input_grad[:6]
    wanted = [need_q, need_k, need_v, need_bias, need_sinks]
    call = _AttentionBackward.apply if torch._C._are_functorch_transforms_active() else torch.ops.tilegrad.attention_bwd
    grads = call(
        q, k, v, o, lse, torch.zeros_like(o) if do is None else do, dlse,
        bias, alibi_slopes, sinks, seed, cu_q, cu_k, *ctx.options, wanted,
    )  # fmt: skip
    dq, dk, dv, dbias, dsinks = (g if want else None for g, want in zip(grads, wanted, strict=True))
    return (dq, dk, dv, dbias, None, dsinks, *none[6:])


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


def _vmap(op: Callable[..., Any], tensors: int) -> Callable[..., Any]:
    """The batching rule of an op whose first `tensors` arguments have a dimension B at 0, or are None.

    Samples are folded into B where q, k and v are each sample's own, and no tensor of the mask nor its gradient is. Otherwise
    each is a call.
    """

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        n = info.batch_size
        in_dims = tuple(d if isinstance(d, int) else None for d in in_dims)  # a list of numbers has a list of None
        first = [x if d is None else x.movedim(d, 0) for x, d in zip(arguments, in_dims, strict=True)]
        bias, alibi_slopes, sinks, seed, cu_seqlens_q = arguments[tensors : tensors + 5]
        shared = (bias is None or bias.ndim < 4 or bias.shape[0] == 1) and (
            alibi_slopes is None or alibi_slopes.ndim == 1
        )
        shared &= all(d is None for d in in_dims[tensors:]) and sinks is None and seed is None and cu_seqlens_q is None
        summed = tensors > 3 and any(arguments[-1][3:])  # dbias
        if None not in in_dims[:3] and shared and not summed:
            own = [
                x if x is None else (x.expand(n, *x.shape) if d is None else x).flatten(0, 1)
                for x, d in zip(first[:tensors], in_dims, strict=False)
            ]
            results = op(*own, *arguments[tensors:])
            return tuple(x.unflatten(0, (n, -1)) if x.ndim > 1 else x.expand(n, *x.shape) for x in results), (0,) * len(
                results
            )
        calls = [op(*(x if d is None else x[i] for x, d in zip(first, in_dims, strict=True))) for i in range(n)]
        return tuple(map(torch.stack, zip(*calls, strict=True))), (0,) * len(calls[0])

    return rule


def _cast_under_autocast(device_type: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def call(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        dtype = torch.get_autocast_dtype(device_type)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
        with torch.autocast(device_type, enabled=False):
            return torch.ops.tilegrad.attention_fwd(q, k, v, *rest)  # type: ignore[no-any-return]

    return call


for _device in ("CPU", "CUDA"):
    _library.impl("attention_fwd", _fwd, _device)
    _library.impl("attention_bwd", _bwd, _device)
    _library.impl("attention_fwd", _cast_under_autocast(_device.lower()), f"Autocast{_device}")
torch.library.register_fake("tilegrad::attention_fwd", _fwd_fake, lib=_library)
torch.library.register_fake("tilegrad::attention_bwd", _bwd_fake, lib=_library)
torch.library.register_autograd("tilegrad::attention_fwd", _attention_backward, setup_context=_save, lib=_library)
torch.library.register_autograd("tilegrad::attention_bwd", _no_second_derivative, lib=_library)
torch.library.register_vmap("tilegrad::attention_fwd", _vmap(torch.ops.tilegrad.attention_fwd, 3), lib=_library)
torch.library.register_vmap("tilegrad::attention_bwd", _vmap(torch.ops.tilegrad.attention_bwd, 7), lib=_library)
