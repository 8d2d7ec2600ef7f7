"""Draws the next token of each sequence.       logits (B, V) float32 or float64   settings (B, 5) float32   seen (B, V) uint8

    settings = temperature T, top_k (0 = all), top_p (1 = all), min_p (0 = all), repetition_penalty (1 = none)

    y   = l · penalty if l < 0, else l / penalty        for tokens in seen, else y = l; a finite l gives a finite y
    z   = (y − max y) / T        e = exp(z)
    kept by top_k     fewer than top_k tokens have a larger y
    kept by top_p     the tokens with a larger e sum to less than top_p · Σ e, both over the tokens that top_k kept
    kept by min_p     e ≥ min_p                         max e = 1
    token   = argmax of z + g over the kept tokens,   g = −log(−log(1 − v)),   v = min((word + ½) / 2³², 1 − 2⁻²⁴)
    word    = first word of Philox4×32-10(counter = (index in V, drawn, sequence mod 2³², sequence div 2³²), key = seed)
    T = 0:    token = argmax y, the first of equal ones
    logprob = l[token] − max l − log Σ exp(l − max l)   from the unchanged logits

The order is as in transformers: penalty, temperature, top_k, top_p, min_p. Tokens of equal y (top_k) or of equal e (top_p)
are kept or removed together, and the largest is always kept. transformers does the same for top_k, but for top_p its sort
decides which of several equal tokens are kept. A row with a NaN or a +inf, or with only −inf, gets token −1 and logprob 0.

A row's result depends on that row alone, and all kernels give the same bits. exp and log are computed from correctly rounded
additions, products and quotients (elementary.py), without fused multiply-adds. Instead of e, its mass is summed: the integer
floor(e · 2ˢ + ½), s = 62 − ⌈log2 V⌉. So the order of a sum does not matter, and float64 logprobs are accurate to about 10⁻¹².
`SAMPLING` is the table of kernels: each module offers `workspace`, `fwd` and `logprobs`. Kernel `torch` sorts the vocabulary.
The others find the smallest kept y and e by a radix search over their bits.
"""

from __future__ import annotations

from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from .. import gpu
from ..checks import check_columns, check_given, check_tensor
from ..cpu import rows
from ..op import op
from ..scratch import Shapes, TensorLike
from ..table import Kernel, Problem, Table, Where, takes_all

SETTINGS = 5  # temperature, top_k, top_p, min_p, repetition_penalty
MOST_TOKENS = 1 << 24  # largest vocabulary; top_k is a float32, which is exact up to here
_DRAW, _LOGPROBS = {"draw": True}, {"draw": False}  # options of a `workspace`

SAMPLING = Table(
    "sample",
    (
        Kernel("triton", "sampling.triton_ops", lambda problem: _triton_refuses(problem)),
        Kernel("native", "sampling.cpu", lambda problem: _native_refuses(problem)),
        Kernel("torch", "sampling.torch_ops", takes_all),
    ),
)


def _triton_refuses(problem: Problem) -> str | None:
    return _takes_float32(problem.x) or gpu.refusal(problem.x)


def _native_refuses(problem: Problem) -> str | None:
    return _takes_float32(problem.x) or rows.refusal(problem.x)


def _takes_float32(x: TensorLike) -> str | None:
    return None if x.dtype == torch.float32 else f"takes float32, not {str(x.dtype).removeprefix('torch.')}"


def sample_workspace(logits: TensorLike, *, kernel: str | None = None) -> Shapes:
    """Name → (shape, dtype) of the scratch of `sample_fwd`."""
    return SAMPLING.workspace(Problem(logits), kernel=kernel, **_DRAW)


def logprobs_workspace(logits: TensorLike, *, kernel: str | None = None) -> Shapes:
    """Name → (shape, dtype) of the scratch of `logprobs_fwd`."""
    return SAMPLING.workspace(Problem(logits), kernel=kernel, **_LOGPROBS)


class Draws(NamedTuple):
    """What each row draws with: settings (B, 5), seeds, sequences and drawn (B,)."""

    settings: Tensor
    seeds: Tensor
    sequences: Tensor
    drawn: Tensor


@op(adds=("tokens", "logprobs", "seen"), one_kernel=True)
def sample_fwd(
    logits: Tensor, settings: Tensor, seeds: Tensor, sequences: Tensor, drawn: Tensor, *,
    tokens: Tensor, logprobs: Tensor, seen: Tensor | None = None, **where: Unpack[Where],
) -> None:  # fmt: skip
    """Draws tokens (B,) int64 with their logprobs (B,), and sets seen[b, token] to 1. seeds, sequences, drawn are (B,) int64.
    drawn is the number of tokens that a sequence has drawn before. A row with drawn = −1 draws no token, and its token and
    logprob do not change. Without `seen` there is no repetition penalty."""
    _check_logits(logits, logprobs)
    (b, v), device = logits.shape, logits.device
    check_given(
        device,
        ("settings", settings, (b, SETTINGS), torch.float32),
        ("seeds", seeds, (b,), torch.int64),
        ("sequences", sequences, (b,), torch.int64),
        ("drawn", drawn, (b,), torch.int64),
        ("tokens", tokens, (b,), torch.int64),
        ("seen", seen, (b, v), torch.uint8),
    )
    given = (settings, seeds, sequences, drawn, tokens, logprobs)
    for name, x in zip(("settings", "seeds", "sequences", "drawn", "tokens", "logprobs"), given, strict=True):
        _check_contiguous(name, x)
    check_columns("seen", seen)
    if device.type == "cpu" and b:
        _check_values(settings, drawn, penalties=seen is not None)
    draws, problem = Draws(settings, seeds, sequences, drawn), Problem(logits)
    SAMPLING.run("fwd", problem, logits, draws, options=_DRAW, tokens=tokens, logprobs=logprobs, seen=seen, **where)


@op()
def logprobs_fwd(logits: Tensor, targets: Tensor, *, logprobs: Tensor, **where: Unpack[Where]) -> None:
    """logprobs (N,) = log softmax(logits)[target]. A row without a target (−1) gives 0. A row with a NaN or a +inf, or with
    only −inf, gives NaN. `sample_fwd` gives the same bits.       logits (N, V)   targets (N,) int64"""
    _check_logits(logits, logprobs)
    n, v = logits.shape
    check_tensor("targets", targets, (n,), torch.int64, logits.device)
    for name, x in (("targets", targets), ("logprobs", logprobs)):
        _check_contiguous(name, x)
    if logits.device.type == "cpu" and n:
        low, high = (int(end) for end in targets.aminmax())
        if low < -1 or high >= v:
            raise ValueError(f"targets: got {low if low < -1 else high}; accepted: 0 … {v - 1}, or −1 for no target")
    SAMPLING.run("logprobs", Problem(logits), logits, targets, options=_LOGPROBS, logprobs=logprobs, **where)


def _check_logits(logits: Tensor, logprobs: Tensor) -> None:
    if logits.dtype not in (torch.float32, torch.float64) or logits.ndim != 2:
        got = f"{logits.dtype} {tuple(logits.shape)}"
        raise ValueError(f"logits: got {got}; accepted: (B, V), torch.float32 or torch.float64 (call .float())")
    if not 1 <= logits.shape[1] <= MOST_TOKENS:
        raise ValueError(f"logits: got {logits.shape[1]} columns; accepted: 1 … {MOST_TOKENS}")
    check_columns("logits", logits)
    check_tensor("logprobs", logprobs, (logits.shape[0],), logits.dtype, logits.device)


def _check_contiguous(name: str, x: Tensor) -> None:
    if not x.is_contiguous():
        raise ValueError(f"{name}: got strides {x.stride()}; accepted: contiguous strides (call .contiguous())")


def _check_values(settings: Tensor, drawn: Tensor, *, penalties: bool) -> None:
    """Called on a CPU only: on a GPU, reading the values would synchronize."""
    largest = torch.finfo(torch.float32).max
    for row, (temperature, top_k, top_p, min_p, penalty) in enumerate(settings.tolist()):
        if not 0 <= temperature <= largest:
            wrong = f"temperature {temperature:g}", "a finite number ≥ 0"
        elif not 0 <= top_k <= largest or top_k % 1:
            wrong = f"top_k {top_k:g}", "a whole number ≥ 0, 0 = all"
        elif not 0 < top_p <= 1:
            wrong = f"top_p {top_p:g}", "a number in (0, 1]"
        elif not 0 <= min_p <= 1:
            wrong = f"min_p {min_p:g}", "a number in [0, 1]"
        elif not 0 < penalty <= largest:
            wrong = f"repetition_penalty {penalty:g}", "a finite number > 0"
        elif penalty != 1 and not penalties:
            wrong = f"repetition_penalty {penalty:g} without seen", "1, or seen (B, V)"
        else:
            continue
        raise ValueError(f"settings: got {wrong[0]} in row {row}; accepted: {wrong[1]}")
    low, high = (int(end) for end in drawn.aminmax())
    if low < -1 or high >= 1 << 32:
        raise ValueError(f"drawn: got {low if low < -1 else high}; accepted: 0 … 2³² − 1, or −1 for no draw")
