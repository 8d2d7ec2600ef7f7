"""The public functions of attention, differentiable by autograd. Options become a `Mask`, and dispatch.py runs the call.

Under autocast q, k and v are cast to the autocast dtype; bias, slopes and sinks keep their dtype. Second derivatives and
forward-mode AD raise NotImplementedError.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Literal, Never, NoReturn, TypedDict, Unpack, overload

import torch
from torch import Tensor

from ..kernels.attention import table
from ..kernels.attention.checks import TENSOR, broadcasts, check_options, check_tensors, require
from ..kernels.attention.mask import Mask, Window, interned_mask
from ..kernels.attention.problem import Problem
from ..kernels.table import Explanation
from .dispatch import attend


class VarlenOptions(TypedDict, total=False):
    """The options of `attention_varlen`; see `attention_varlen` and `attention`."""

    causal: bool
    window: Window | None
    scale: float | None
    softcap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    dropout_p: float
    seed: int | Tensor | None
    deterministic: bool | None
    kernel: str | None


class AttentionOptions(VarlenOptions, total=False):
    """The options of `attention`."""

    bias: Tensor | None
    intervals: Tensor | None


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[AttentionOptions]
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[AttentionOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[AttentionOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: Window | None = None, scale: float | None = None,
    softcap: float = 0.0, bias: Tensor | None = None, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
    intervals: Tensor | None = None, dropout_p: float = 0.0, seed: int | Tensor | None = None, return_lse: bool = False,
    deterministic: bool | None = None, kernel: str | None = None, **unknown: object,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(scale · q kᵀ + …) v with exact gradients of q, k, v, bias and sinks, also through lse.

    q (B, Hq, Tq, D), k (B, Hkv, Tk, D), v (B, Hkv, Tk, Dv). The last stride is 1, and Hq is a multiple of Hkv. The result
    is (B, Hq, Tq, Dv), in the memory layout of q. Options are applied to the scores s of query i and key j in this order:

    scale         s = scale · q·k; None = 1/√D
    softcap       c > 0: s = c·tanh(s/c)
    bias          s + bias; broadcasts to (B, Hq, Tq, Tk); float32 or q's dtype. Or bool: True attends; no gradient
    alibi_slopes  s − slope[h]·|i + Tk − Tq − j|; (Hq,) or (B, Hq); no gradient
    causal        query i attends to keys j ≤ i + Tk − Tq
    window        (left, right): i + Tk − Tq − left ≤ j ≤ i + Tk − Tq + right; None = open on that side
    intervals     (B or 1, Hkv or 1, Tk, 2 or 4) int32: row i of q does not attend to column j if
                  intervals[…, j, 0] ≤ i < intervals[…, j, 1] or, with 4 numbers, intervals[…, j, 2] ≤ i < intervals[…, j, 3]
    sinks         (Hq,): one logit per head, which joins the softmax and has no value
    dropout_p     drops probabilities after the softmax; the same seed drops the same probabilities in every kernel
    seed          an int; a 0-d int64 tensor, which is read on the device; or None: drawn from torch's generator

    A row that attends to no key gives 0. return_lse=True also returns the natural logarithm of the sum of exponentials of
    each row, (B, Hq, Tq) in float32 (float64 for float64), differentiable. deterministic=True gives the same bits every time;
    None follows torch.use_deterministic_algorithms. The kernel that `kernel` names runs or raises. `explain` says which
    kernel would run, and why.

    >>> import torch, tilegrad
    >>> q = torch.randn(1, 8, 128, 64, requires_grad=True)
    >>> k, v = torch.randn(2, 1, 2, 128, 64)
    >>> o, lse = tilegrad.attention(q, k, v, causal=True, window=(63, 0), return_lse=True)
    >>> o.shape, lse.shape
    (torch.Size([1, 8, 128, 64]), torch.Size([1, 8, 128]))
    >>> (o.square().sum() + lse.sum()).backward()
    """
    if unknown:
        _refuse(unknown, attention)
    if bias is alibi_slopes is sinks is seed is intervals is None:
        mask = interned_mask(causal, window, scale, softcap, dropout_p)
    else:
        mask = Mask(causal, window, scale, softcap, bias, alibi_slopes, sinks, dropout_p, seed, intervals=intervals)
    return attend(q, k, v, mask, return_lse=return_lse, deterministic=deterministic, kernel=kernel)


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *, return_lse: Literal[False] = False, **options: Unpack[VarlenOptions],
) -> Tensor: ...  # fmt: skip
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *, return_lse: Literal[True], **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *, return_lse: bool, **options: Unpack[VarlenOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, *,
    causal: bool = False, window: Window | None = None, scale: float | None = None, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, dropout_p: float = 0.0,
    seed: int | Tensor | None = None, return_lse: bool = False, deterministic: bool | None = None,
    kernel: str | None = None, **unknown: object,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`attention` over sequences packed end to end: q (total_q, Hq, D), k (total_k, Hkv, D), v (total_k, Hkv, Dv).

    Sequence b has rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q, and rows cu_seqlens_k[b] to cu_seqlens_k[b + 1] of k and v.
    A sequence may be empty. cu_seqlens_* are int32, on q's device. max_seqlen_* are the longest lengths. The result is
    (total_q, Hq, Dv), and lse is (Hq, total_q). The values of cu_seqlens are checked on a CPU; on a GPU only with
    TILEGRAD_CHECK=1 in the environment.

    >>> import torch, tilegrad
    >>> q, k, v = torch.randn(3, 10, 4, 32)
    >>> ends = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
    >>> tilegrad.attention_varlen(q, k, v, ends, ends, 7, 7, causal=True).shape
    torch.Size([10, 4, 32])
    """
    if unknown:
        _refuse(unknown, attention_varlen)
    packed = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    mask = Mask(causal, window, scale, softcap, None, alibi_slopes, sinks, dropout_p, seed, *packed)
    return attend(q, k, v, mask, return_lse=return_lse, deterministic=deterministic, kernel=kernel)


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention with tilegrad's kernels: the same arguments and results.

    query (…, Hq, L, E), key (…, H, S, E), value (…, H, S, Ev) → (…, Hq, L, Ev). Dimensions before the last two
    broadcast; with enable_gqa Hq is a multiple of H. attn_mask broadcasts to (…, Hq, L, S). A bool mask is True where a
    pair attends; a mask of numbers is added to the scores.

    `attention` differs in two ways: it does not broadcast dimensions, and its causal is aligned at the bottom right. is_causal
    is aligned at the top left (row i attends to columns j ≤ i), which is the same if L = S.

    >>> import torch, tilegrad
    >>> q, k, v = torch.randn(3, 2, 4, 16, 32)
    >>> torch.allclose(tilegrad.sdpa(q, k, v, is_causal=True), tilegrad.attention(q, k, v, causal=True))
    True
    """
    given = (("query", query), ("key", key), ("value", value))
    for name, x in given:
        require(isinstance(x, Tensor), name, type(x).__name__, TENSOR, TypeError, show=str)
        enough = x.ndim >= (3 if enable_gqa else 2)
        require(enough, name, f"shape {tuple(x.shape)}", "(…, L, E), or with enable_gqa (…, H, L, E)", show=str)
    require(attn_mask is None or not is_causal, "attn_mask", "a mask and is_causal=True", "one of the two", show=str)
    dims = max(x.ndim for _, x in given)
    q, k, v = (x if x.ndim > 2 else x[None] for _, x in given)
    heads = None if enable_gqa else _common("heads", _HEADS, *(x.shape[-3:-2] for x in (q, k, v)))
    batch = _common("batch dimensions", "shapes that broadcast", *(x.shape[:-3] for x in (q, k, v)))
    q, k, v = (_rows(x.expand(*batch, *(heads or x.shape[-3:-2]), *x.shape[-2:])) for x in (q, k, v))
    bias, window, rows = attn_mask, None, q.shape[2]
    if bias is not None:
        _check_attn_mask(bias, (*batch, q.shape[1], rows, k.shape[2]))
    if bias is not None and bias.ndim > 3 and len(batch) != 1:
        bias = bias.expand(*batch, *bias.shape[-3:]).reshape(-1, *bias.shape[-3:])
    if is_causal:  # no row attends to columns j ≥ L; `window` moves the alignment to the top left
        k, v = k[:, :, :rows], v[:, :, :rows]
        window = (None, rows - k.shape[2])
    o = attention(q, k, v, bias=bias, window=window, scale=scale, dropout_p=dropout_p)
    return o.reshape((*batch, *o.shape[1:])[-dims:])


_HEADS = "equal numbers, or enable_gqa=True if query's are a multiple of key's (tilegrad.attention needs no flag)"


def _common(what: str, accepted: str, *shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape to which the shapes of query, key and value broadcast."""
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        q, k, v = (", ".join(map(str, shape)) or "none" for shape in shapes)
    raise ValueError(f"key: got {what} {k}; query has {q}, value {v}; accepted: {accepted}")


def _check_attn_mask(mask: Tensor, scores: tuple[int, ...]) -> None:
    require(isinstance(mask, Tensor), "attn_mask", type(mask).__name__, f"None or {TENSOR}", TypeError, show=str)
    got = f"shape {tuple(mask.shape)} for (…, Hq, L, S) = {tuple(scores)}"
    require(broadcasts(mask.shape, scores), "attn_mask", got, "a shape that broadcasts to (…, Hq, L, S)", show=str)


def _rows(x: Tensor) -> Tensor:
    """(…, H, T, D) → (B, H, T, D) with contiguous rows; a view if possible."""
    x = x if x.ndim == 4 else x.reshape(-1, *x.shape[-3:])
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def explain(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: Window | None = None, scale: float | None = None,
    softcap: float = 0.0, bias: Tensor | None = None, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
    intervals: Tensor | None = None, dropout_p: float = 0.0, seed: int | Tensor | None = None,
    deterministic: bool | None = None, kernel: str | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int = 0, max_seqlen_k: int = 0,
    o: Tensor | None = None, do: Tensor | None = None, dq: Tensor | None = None, dk: Tensor | None = None,
    dv: Tensor | None = None, **unknown: Never,
) -> Explanation:  # fmt: skip
    """Says which kernel runs this call of `attention` (with cu_seqlens: `attention_varlen`), and why other kernels do not.

    `deterministic` has no effect. It is accepted so that the arguments of a call can be copied. Give o, do, dq, dk and
    dv if you call `attention_fwd` or `attention_bwd` on your own buffers, because a kernel may not support their layout.

    >>> import torch, tilegrad
    >>> found = tilegrad.explain(*torch.randn(3, 1, 4, 16, 32), dropout_p=0.1, kernel="tiled")
    >>> found.kernel, found.reasons["tiled"]
    ('tiled', 'runs: asked for by name')
    """
    del deterministic
    if unknown:
        _refuse(unknown, explain)
    packed, seed = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), 0 if seed is None else seed
    mask = Mask(causal, window, scale, softcap, bias, alibi_slopes, sinks, dropout_p, seed, *packed, intervals)
    check_options(q, k, v, mask)
    check_tensors(q, k, v, mask)
    return table.ATTENTION.explain(Problem(q, k, v, mask, o=o, do=do, dq=dq, dk=dk, dv=dv), kernel)


_ELSEWHERE = {  # option of another library → (our name, key of _THEIR_NAMES or None)
    "is_causal": ("causal", "sdpa"),
    "attn_mask": ("bias", "sdpa"),
    "softmax_scale": ("scale", "flash"),
    "window_size": ("window", "flash"),
    "return_attn_probs": ("return_lse", "flash"),
    "return_softmax_lse": ("return_lse", "flash"),
    "attn_bias": ("bias", None),
    "dropout": ("dropout_p", None),
    "p": ("dropout_p", None),
    "s_aux": ("sinks", None),
    "sm_scale": ("scale", None),
}
_THEIR_NAMES = {  # our functions that take the names of another library
    "sdpa": ", or tilegrad.sdpa, which takes torch's names",
    "flash": ", or tilegrad.flash, which takes flash-attn's names",
}


def _refuse(unknown: Mapping[str, object], function: Callable[..., object]) -> NoReturn:
    """Raises TypeError for the first unknown option, and suggests the option that was probably meant."""
    options = [name for name, x in inspect.signature(function).parameters.items() if x.kind is x.KEYWORD_ONLY]
    name, value = next(iter(unknown.items()))
    ours, library = _ELSEWHERE.get(name, (None, None))
    if name == "enable_gqa":
        accepted = f"nothing: GQA needs no flag here{_THEIR_NAMES['sdpa']}"
    elif name == "intervals":
        accepted = (
            "None for packed sequences; tilegrad.masks.documents writes them as intervals of a dense call of attention"
        )
    elif ours in options:
        accepted = f"{ours}= here{_THEIR_NAMES[library] if library else ''}"
    else:
        close = difflib.get_close_matches(name, options, 1)
        accepted = f"{f'{close[0]}=? Or any of ' if close else ''}{', '.join(options)}"
    got = f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
    raise TypeError(f"{name}: got {got}; accepted: {accepted}")
