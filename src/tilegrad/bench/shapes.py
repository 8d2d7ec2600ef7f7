"""The shapes on which attention is measured, by preset."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..kernels.attention import Mask
from ..kernels.attention.checks import MAX_HEAD_DIM
from . import cost


@dataclass(frozen=True, slots=True)
class Shape:
    """B sequences of T tokens, or packed sequences of `lengths`. A window is causal: a row attends to at most so many keys."""

    b: int
    h: int
    t: int
    d: int
    causal: bool = False
    window: int | None = None
    hkv: int = 0  # 0: equal to h
    tq: int = 0  # 0: equal to t
    lengths: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Shape:
        """B,H,T,D, then optionally causal, window=N, hkv=N, tq=N: '4,32,4096,64,causal'."""
        words = text.split(",")
        if len(words) < 4:
            raise ValueError(f"{len(words)} numbers instead of 4")
        assignments = [*(f"{name}={word}" for name, word in zip("bhtd", words, strict=False)), *words[4:]]
        fields: dict[str, Any] = {}
        for word in assignments:
            name, _, value = word.partition("=")
            if word != "causal" and name not in ("b", "h", "t", "d", "window", "hkv", "tq"):
                raise ValueError(f"unknown {word!r}")
            if name in fields:
                raise ValueError(f"{name} is given twice")
            if word != "causal" and not value.isdecimal():
                raise ValueError(f"{value!r} is not a positive number")
            fields[name] = word == "causal" or int(value)
        if min(fields.values()) < 1:
            raise ValueError("a number is 0")
        if fields["d"] > MAX_HEAD_DIM:
            raise ValueError(f"D={fields['d']} is more than {MAX_HEAD_DIM}")
        if fields["h"] % fields.get("hkv", 1):
            raise ValueError(f"hkv={fields['hkv']} does not divide H={fields['h']}")
        return cls(**fields)

    def mask(self, device: torch.device) -> Mask:
        window = None if self.window is None else (self.window - 1, 0)
        if not self.lengths:
            return Mask(causal=self.causal, window=window)
        ends = torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32, device=device)
        longest = max(self.lengths)
        return Mask(
            self.causal, window, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest
        )

    @property
    def band(self) -> tuple[int | None, int | None]:
        left = None if self.window is None else self.window - 1
        return left, 0 if self.causal or self.window is not None else None

    @property
    def rows(self) -> int:
        return self.tq or self.t

    def flops(self, *, backward: bool) -> int:
        left, right = self.band
        sequences = [(1, n, n) for n in self.lengths] or [(self.b, self.rows, self.t)]
        return sum(
            cost.attention_flops(b, self.h, tq, tk, self.d, self.d, left=left, right=right, backward=backward)
            for b, tq, tk in sequences
        )

    def bytes(self, element_bytes: int, *, backward: bool) -> int:
        b, tq, tk = (1, sum(self.lengths), sum(self.lengths)) if self.lengths else (self.b, self.rows, self.t)
        return cost.attention_bytes(
            b, self.h, self.hkv or self.h, tq, tk, self.d, self.d, element_bytes, backward=backward
        )

    def __str__(self) -> str:
        what = f"window {self.window}" if self.window else "causal" if self.causal else "full"
        heads = f"{self.h}/{self.hkv}" if self.hkv else f"{self.h}"
        if self.lengths:
            return f"{len(self.lengths)} packed H{heads} T≤{max(self.lengths)} D{self.d} {what}"
        return f"B{self.b} H{heads} {f'{self.tq}×' if self.tq else 'T'}{self.t} D{self.d} {what}"


def _tokens(lengths: Sequence[int], tokens: int, hidden: int, dims: Sequence[int] = (64, 128)) -> tuple[Shape, ...]:
    return tuple(
        Shape(tokens // t, hidden // d, t, d, causal) for d in dims for causal in (False, True) for t in lengths
    )


def _packed(tokens: int, hidden: int, dims: Sequence[int] = (64, 128)) -> tuple[Shape, ...]:
    """Packed shapes whose lengths are log-normal (median 1024, σ = 0.8) and add up to `tokens`, each followed by a dense shape
    with as much work."""
    g = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        drawn = round(1024 * math.exp(0.8 * float(torch.randn((), generator=g))))
        lengths.append(min(max(drawn, 16), tokens - sum(lengths)))
    b = round(tokens**2 / sum(n * n for n in lengths))
    shapes = []
    for d in dims:
        for causal in (False, True):
            shapes.append(Shape(0, hidden // d, 0, d, causal, lengths=tuple(lengths)))
            shapes.append(Shape(b, hidden // d, tokens // b, d, causal))
    return tuple(shapes)


PRESETS: dict[str, tuple[Shape, ...]] = {
    "training": _tokens((1024, 2048, 4096, 8192, 16384), 16384, 2048, (64, 128, 256)),
    "short": _tokens((4096, 16384), 16384, 2048),
    "window": (Shape(1, 16, 65536, 128, window=1024),),
    "wide": _tokens((2048, 16384), 16384, 2048, (256,)),
    "gqa": tuple(Shape(16384 // t, 32, t, 128, causal=True, hkv=4) for t in (1024, 4096, 16384)),
    "varlen": _packed(32768, 2048),
    "decode": tuple(Shape(b, 32, t, 128, hkv=8, tq=1) for b, t in ((1, 65536), (16, 8192))),
    "laptop": _tokens((256, 1024), 1024, 512, (64,)),
    "cpu": tuple(
        Shape(b, h, t, d, causal)
        for b, h, t, d in ((1, 8, 1024, 64), (2, 12, 1024, 64), (1, 8, 4096, 64), (1, 8, 4096, 128))
        for causal in (False, True)
    ),
    "cpu-window": tuple(Shape(1, 2, t, 64, window=256) for t in (8192, 16384)),
}
