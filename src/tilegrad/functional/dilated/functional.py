"""Differentiable dilated attention: checks the call, then runs it eagerly, or as torch.library ops if it is traced or
transformed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ...kernels.attention.checks import check_options, check_tensors, require
from ...kernels.attention.mask import Mask
from ..autograd import is_plain_tensor, is_traced_or_transformed
from ..call import autocast
from ..dispatch import seed_tensor
from ..scratch import number_of
from .pattern import MODES, Mode
from .run import Options, backward, forward

if TYPE_CHECKING:
    from ...memory.managed.manager import AttentionBufferManager


_KERNEL = "None or a kernel other than 'reference', which recomputes o and lse"


def _check_absent(**options: object) -> None:
    accepted = "None; dilated attention supports only segments, rates, causal, scale and dropout"
    for name, value in options.items():
        require(value is None, name, value, accepted, show=lambda x: "a tensor" if isinstance(x, Tensor) else repr(x))


def _checked_pattern(
    q: Tensor, k: Tensor, lengths: Sequence[int], rates: Sequence[int], mode: Mode
) -> tuple[list[int], list[int]]:
    """Checks the pattern and the sizes of q and k. Returns lengths and rates as lists."""
    pattern = check_pattern(lengths, rates, mode)
    branches = len(pattern[0])
    require(k.shape[2] == q.shape[2], "k", f"{k.shape[2]} positions, but q has {q.shape[2]}", "as many as q", show=str)
    require(k.shape[1] == q.shape[1], "k", f"{k.shape[1]} heads, but q has {q.shape[1]}", "as many as q", show=str)
    fewer, accepted = mode == "head_groups" and q.shape[1] < branches, "at least as many heads as branches"
    require(not fewer, "q", f"{q.shape[1]} heads for {branches} branches", accepted, show=str)
    return pattern


def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    mode: Mode = "head_groups",
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    attn_mask: None = None,
    bias: None = None,
    window: None = None,
    sinks: None = None,
    intervals: None = None,
    deterministic: bool | None = None,
    kernel: str | None = None,
    manager: AttentionBufferManager | None = None,
) -> Tensor:
    """Attention among every r-th position of each segment of q, k, v (B, H, T, D), with exact gradients, in time linear in T.

    segment_lengths   length of the segments of each branch; lengths above T count as T; the last segment may be shorter
    dilation_rates    r of each branch
    mode              "head_groups": one contiguous group of heads per branch; the first groups have one more head if the
                      heads do not divide evenly. In group g the positions g mod r, g mod r + r, … of a segment attend to
                      each other, and the result at other positions is 0. The result is divided by the number of branches.
                      "longnet": every branch covers all heads; head h begins at position h mod r of a segment. The
                      result is Σ_b softmax_b(lse_b) o_b over the branches b that cover a position, and 0 at a position
                      that no branch covers
    causal            no position attends to a later position
    scale             factor of the scores; None: 1/√D
    dropout_p         drops probabilities once, after the softmax; seed and shapes determine which
    manager           an AttentionBufferManager for temporary buffers; None: torch's allocator

    attn_mask, bias, window, sinks and intervals are not supported and must be None. deterministic and kernel are as
    in `tilegrad.attention`, but kernel="reference" raises, because it recomputes o and lse. The result has q's memory layout.

    >>> import torch, tilegrad
    >>> q, k, v = torch.randn(3, 1, 6, 4096, 64)
    >>> tilegrad.dilated_attention(q, k, v, (1024, 4096), (1, 4), causal=True).shape
    torch.Size([1, 6, 4096, 64])
    """
    _check_absent(attn_mask=attn_mask, bias=bias, window=window, sinks=sinks, intervals=intervals)
    check_options(q, k, v, Mask(causal, scale=scale, dropout_p=dropout_p, seed=seed))
    check_tensors(q, k, v, Mask(causal))
    segments, rates = _checked_pattern(q, k, segment_lengths, dilation_rates, mode)
    require(kernel != "reference", "kernel", kernel, _KERNEL)
    seed = seed_tensor(Mask(causal, dropout_p=dropout_p, seed=seed), q.device) if dropout_p else None
    deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    training = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    options = Options(
        segments, rates, mode, causal, scale, float(dropout_p), deterministic, kernel, training, number_of(manager)
    )
    if not is_traced_or_transformed() and is_plain_tensor(q, k, v, seed):
        if torch._C._is_any_autocast_enabled():
            q, k, v = autocast(q, k, v)
        return cast(Tensor, _Eager.apply(q, k, v, seed, options)) if training else forward(q, k, v, seed, *options)[0]
    from .ops import dilated_fwd

    y: Tensor = dilated_fwd(q, k, v, seed, *options)[0]
    return y


def check_pattern(
    segment_lengths: Sequence[int], dilation_rates: Sequence[int], mode: str
) -> tuple[list[int], list[int]]:
    """Checks the mode, the lengths and the rates. Returns lengths and rates as lists."""
    require(mode in MODES, "mode", mode, " or ".join(map(repr, MODES)))
    for name, values in (("segment_lengths", segment_lengths), ("dilation_rates", dilation_rates)):
        is_sequence = isinstance(values, Sequence) and not isinstance(values, str)
        positive = is_sequence and len(values) > 0 and all(type(n) is int and n > 0 for n in values)
        require(positive, name, values, "a sequence of ints ≥ 1, one per branch")
    got = f"{len(dilation_rates)} for {len(segment_lengths)} segment_lengths"
    require(len(segment_lengths) == len(dilation_rates), "dilation_rates", got, "one per branch", show=str)
    return list(segment_lengths), list(dilation_rates)


class _Eager(torch.autograd.Function):
    """Forward and backward without the dispatcher, for plain tensors outside of modes and transforms."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, options: Options) -> Tensor:
        y, lse = forward(q, k, v, seed, *options)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, seed, y, lse)
        ctx.options = options
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, seed, y, lse = ctx.saved_tensors
        if dy is None:
            return (None,) * 5
        wanted = list(ctx.needs_input_grad[:3])
        arguments = (q, k, v, y, lse, dy, seed, *ctx.options, wanted)
        if (
            not torch.is_grad_enabled()
            and not is_traced_or_transformed()
            and is_plain_tensor(q, k, v, y, lse, dy, seed)
        ):
            grads = backward(*arguments)
        else:
            from .ops import dilated_bwd

            grads = dilated_bwd(*arguments)
        dq, dk, dv = (g if want else None for g, want in zip(grads, wanted, strict=True))
        return dq, dk, dv, None, None
