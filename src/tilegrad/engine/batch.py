"""Which batches and sizes an engine accepts, and the errors for others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from ..kernels.fp8_linear import FP8_LINEAR, Problem
from ..kernels.scratch import Form
from ..model.config import LIMITS as MODEL_LIMITS
from ..model.config import is_count
from ..model.layer import Linear
from ..model.lora import LoraConfig
from ..text.untrusted import shown
from .spec import StepSpec

Batch = tuple[Tensor, Tensor]  # tokens, targets

LIMITS = {"batch_size": 1 << 16, "seq_len": MODEL_LIMITS["block_size"]}  # docs/training.md gives the reasons

_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
_INTS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def check_spec(spec: StepSpec) -> None:
    """Refuse sizes, a dtype or a `linear` that no engine supports; parallel/check.py checks ranks."""
    for name, value in (("batch_size", spec.batch_size), ("seq_len", spec.seq_len)):
        if not is_count(value, LIMITS[name]):
            raise ValueError(f"{name}: got {shown(value)}; accepted: an int ≥ 1, at most {LIMITS[name]:,}")
    if spec.seq_len > spec.config.block_size:
        raise ValueError(f"seq_len: got {spec.seq_len}; accepted: at most block_size, {spec.config.block_size}")
    if spec.dtype not in _DTYPES:
        raise ValueError(f"dtype: got {spec.dtype}; accepted: {', '.join(map(str, _DTYPES))}")
    if spec.linear not in get_args(Linear):
        raise ValueError(f"linear: got {spec.linear!r}; accepted: {' or '.join(map(repr, get_args(Linear)))}")
    patterns: object = spec.freeze
    if not isinstance(patterns, tuple) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(
            f"freeze: got {shown(patterns)}; accepted: a sequence of patterns, such as ('wte.*', '*.bias')"
        )
    if spec.lora is not None and not isinstance(spec.lora, LoraConfig):
        raise ValueError(f"lora: got {shown(spec.lora)}; accepted: None or a LoraConfig")
    if spec.linear == "fp8":
        form = Form((16, 16), spec.dtype, spec.device)
        bfloat16 = spec.dtype == torch.bfloat16
        reason = FP8_LINEAR.rows[0].refuses(Problem(form, form)) if bfloat16 else "needs dtype bfloat16"
        if reason is not None:
            raise ValueError(f"linear: got 'fp8', which {reason}; accepted: 'plain' here")


def micro_batches(tokens: Tensor | Sequence[Tensor], targets: Tensor | Sequence[Tensor]) -> list[Batch]:
    """The micro-batches of a step: one if both arguments are tensors, else one for each pair of the lists."""
    x, y = ([given] if isinstance(given, Tensor) else list(given) for given in (tokens, targets))
    if len(x) != len(y):
        raise ValueError(f"targets: got {len(y)} micro-batches; accepted: {len(x)}, as tokens has")
    return list(zip(x, y, strict=True))


def check_some(micro_batches: int) -> None:
    """Refuse a step in which no rank has a micro-batch: decay and moments would still change the weights."""
    if not micro_batches:
        raise ValueError(
            "tokens: got no micro-batch; accepted: one or more (with several ranks, on at least one of them)"
        )


def count_targets(targets: Tensor) -> int:
    return int((targets >= 0).sum())


def check_batch(tokens: Tensor, targets: Tensor, spec: StepSpec) -> None:
    """Refuse a wrong shape or dtype. Values are checked on a CPU; on CUDA only with TILEGRAD_CHECK=1, because it would wait."""
    for name, x in (("tokens", tokens), ("targets", targets)):
        if not isinstance(x, Tensor) or x.ndim != 2 or x.dtype not in _INTS:
            got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name}: got {got}; accepted: a tensor of ints, (b, t)")
    b, t = tokens.shape
    if not (1 <= b <= spec.batch_size and 1 <= t <= spec.seq_len):
        limit = f"(1 … {spec.batch_size}, 1 … {spec.seq_len})"
        raise ValueError(f"tokens: got shape {(b, t)}; accepted: (b, t) in {limit}, as the engine was planned")
    if targets.shape != tokens.shape:
        raise ValueError(f"targets: got shape {tuple(targets.shape)}; accepted: that of tokens, {(b, t)}")
    if tokens.device.type == "cpu" or os.environ.get("TILEGRAD_CHECK") == "1":
        _check_range("tokens", tokens, 0, spec.config.vocab_size)
        _check_range("targets", targets, -1, spec.config.vocab_size)


def _check_range(name: str, x: Tensor, low: int, vocab_size: int) -> None:
    smallest, largest = (int(end) for end in x.aminmax())
    if smallest >= low and largest < vocab_size:
        return
    wrong = ((x < low) | (x >= vocab_size)).nonzero()[0].tolist()
    value = int(x[tuple(wrong)])
    ignored = "; −1 marks a position without a target" if name == "targets" else ""
    torch_like = " (torch's ignore_index −100 is not used here)" if value == -100 else ""
    raise ValueError(f"{name}: got {value} at {wrong}{torch_like}; accepted: 0 … {vocab_size - 1}{ignored}")
