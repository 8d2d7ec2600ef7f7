"""Attention as torch.library ops, for compilers, transforms, fake tensors, subclasses and modes.

    tilegrad::attention_fwd(q, k, v, …mask) → (o, lse)
    tilegrad::attention_bwd(q, k, v, o, lse, do, dlse, …mask) → (dq, dk, dv, dbias, dsinks)      empty if not wanted

An op takes a mask as the flat list of its fields, because a schema cannot have a dataclass. grad and jacrev of
torch.func run attention_bwd (differentiable.py). vmap folds its dimension into B, or makes one call per sample
(`_vmap`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels.attention.checks import check_options, check_tensors
from ..kernels.attention.mask import Mask
from .call import backward, backward_key, forward, forward_key, new_gradients, new_outputs
from .differentiable import batching_rule, has_tangent, raise_forward_mode, register

_FIELDS = (
    "Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, Tensor? seed, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? intervals, SymInt max_seqlen_q, SymInt max_seqlen_k, bool causal, int? left, int? right, float? scale, "
    "float softcap, float dropout_p"
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


def tensors_of(mask: Mask, seed: int | Tensor | None) -> tuple[Any, ...]:
    """The tensors among _FIELDS. `seed` is separate because the seed of the mask may not be a tensor yet."""
    return (mask.bias, mask.alibi_slopes, mask.sinks, seed, mask.cu_seqlens_q, mask.cu_seqlens_k, mask.intervals)


def numbers_of(mask: Mask) -> tuple[Any, ...]:
    """The numbers among _FIELDS."""
    left, right = mask.window or (None, None)
    longest = mask.max_seqlen_q, mask.max_seqlen_k
    return (*longest, mask.causal, left, right, mask.scale, mask.softcap, mask.dropout_p)


def mask_of(*fields: Any) -> Mask:
    """The mask from an op's arguments, in the order of _FIELDS."""
    bias, alibi_slopes, sinks, seed, cu_seqlens_q, cu_seqlens_k, intervals = fields[:7]
    max_seqlen_q, max_seqlen_k, causal, left, right, scale, softcap, dropout_p = fields[7:]
    packed = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return Mask(causal, (left, right), scale, softcap, bias, alibi_slopes, sinks, dropout_p, seed, *packed, intervals)


def attend_by_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    seed: Tensor | None,
    *,
    return_lse: bool,
    deterministic: bool,
    kernel: str | None,
) -> Tensor | tuple[Tensor, Tensor]:
    check_options(q, k, v, mask)
    if has_tangent(q, k, v, *mask.tensors):
        raise_forward_mode("tilegrad attention")
    arguments = (q, k, v, *tensors_of(mask, seed), *numbers_of(mask), deterministic, kernel)
    if torch._C._are_functorch_transforms_active():
        if torch.compiler.is_compiling():
            _keep_in_graph()
        o, lse = _transformed(*arguments)
    else:
        o, lse = torch.ops.tilegrad.attention_fwd(*arguments)
    return (o, lse) if return_lse else o


def _fwd(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *fields, _, kernel = rest
    mask = mask_of(*fields)
    return forward(q, k, v, mask, kernel, forward_key(q, k, v, mask, kernel))


def _bwd(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    reads = q, k, v, o, lse, do, dlse
    *fields, deterministic, kernel, wanted = rest
    mask, wanted = mask_of(*fields), tuple(wanted)
    key = backward_key(reads, mask, wanted, kernel, deterministic=deterministic)
    return _as_tensors(q, backward(reads, mask, wanted, kernel, key, deterministic=deterministic))


def _as_tensors(q: Tensor, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """Gradients as the op returns them: empty tensors instead of None."""
    return tuple(q.new_empty(0) if x is None else x for x in gradients)


def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    mask = mask_of(*rest[:-2])
    check_tensors(q, k, v, mask)
    return new_outputs(q, v, mask)


def _bwd_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    _, _, _, _, *fields, _, _, wanted = rest  # o, lse, do, dlse; deterministic, kernel
    return _as_tensors(q, new_gradients(q, k, v, mask_of(*fields), wanted))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:10], *output)
    ctx.options = inputs[10:]


def _attention_backward(ctx: Any, do: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
    q, k, v, *mask_tensors, o, lse = ctx.saved_tensors
    *numbers, deterministic, kernel = ctx.options
    need_q, need_k, need_v, need_bias, _, need_sinks = ctx.needs_input_grad[:6]
    none = (None,) * (len(ctx.needs_input_grad) - 6)
    if do is None and dlse is None:
        return (None,) * 6 + none
    saved = (q, k, v, o, lse, torch.zeros_like(o) if do is None else do, dlse)
    wanted = (need_q, need_k, need_v, need_bias, need_sinks)
    dq, dk, dv, dbias, dsinks = backward_by_op(saved, (*mask_tensors, *numbers, deterministic, kernel), wanted)
    return (dq, dk, dv, dbias, None, dsinks, *none)


def backward_by_op(
    saved: tuple[Tensor | None, ...], options: tuple[Any, ...], wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    grads = _attention_bwd(*saved, *options, list(wanted))
    return tuple(g if want else None for g, want in zip(grads, wanted, strict=True))


def _transformed(*arguments: Any) -> Any:
    return _attention_fwd(*arguments)


def _keep_in_graph() -> None:
    """Makes torch.compile call `_transformed`, which can't be traced, without tracing it. Called only while torch.compile
    traces, because allow_in_graph loads torch's compiler, which takes 1.6 s."""
    torch.compiler.allow_in_graph(_transformed)


_keep_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result does


def _vmap(op: Callable[..., Any], tensors: int) -> Callable[..., Any]:
    """Folds samples into B if q, k and v all have the vmap dimension, and the tensors of the mask are the same for all samples:
    none has the vmap dimension or a dimension B other than 1. With sinks, a seed, cu_seqlens or dbias, each sample is a call of
    its own."""

    def folds(in_dims: tuple[Any, ...], arguments: tuple[Any, ...]) -> bool:
        bias, alibi_slopes, sinks, seed, cu_seqlens_q, _, intervals = arguments[tensors : tensors + 7]
        shared = (bias is None or bias.ndim < 4 or bias.shape[0] == 1) and (
            alibi_slopes is None or alibi_slopes.ndim == 1
        )
        shared &= intervals is None or intervals.shape[0] == 1
        shared &= all(d is None for d in in_dims[tensors:]) and sinks is None and seed is None and cu_seqlens_q is None
        summed = tensors > 3 and any(arguments[-1][3:])  # dbias sums over B
        return None not in in_dims[:3] and shared and not summed

    return batching_rule(op, tensors, folds)


_attention_fwd, _attention_bwd = register(
    _library,
    "attention",
    "tilegrad attention",
    (_fwd, _bwd),
    (_fwd_fake, _bwd_fake),
    _save,
    _attention_backward,
    (_vmap(torch.ops.tilegrad.attention_fwd, 3), _vmap(torch.ops.tilegrad.attention_bwd, 7)),
)
