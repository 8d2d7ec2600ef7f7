"""Angles of rotary positions, position · frequency[i] with i < D/2, and how models change the frequencies for longer texts.

default   f_i = theta^(−2i/D)
linear    f_i / factor
llama3    f/factor for wavelengths 2π/f longer than original/low, f for wavelengths shorter than original/high;
          between: (1 − m) · f/factor + m · f,  m = (original/wavelength − low) / (high − low)
yarn      f for i ≤ ⌊fast⌋, f/factor for i ≥ ⌈slow⌉, linear in i between. In `original` tokens, frequency[fast] makes
          beta_fast rotations and frequency[slow] makes beta_slow. cos and sin are multiplied by attention_factor, by
          default 0.1 · ln(factor) + 1
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from ..checks import is_number

Kind = Literal["linear", "llama3", "yarn"]
_ROTATIONS = ("low", "high", "beta_fast", "beta_slow")
_MOST = 1e9  # the limit of every field; the largest published `original` is 262,144


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How a model that was trained on `original` tokens scales its frequencies to read `factor` times as many."""

    kind: Kind
    factor: float
    original: int = 8192
    low: float = 1.0
    high: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            accepted = " or ".join(map(repr, get_args(Kind)))
            raise ValueError(f"rope_scaling.kind: got {self.kind!r}; accepted: {accepted}")
        for name, least in (
            ("factor", 1.0),
            ("original", 1),
            *((name, 1e-6) for name in _ROTATIONS),
            ("attention_factor", 0.0),
        ):
            value = getattr(self, name)
            if value is None and name == "attention_factor":
                continue
            if not is_number(value) or not least <= value <= _MOST:
                raise ValueError(
                    f"rope_scaling.{name}: got {value!r}; accepted: a number ≥ {least:g}, at most {_MOST:g}"
                )
        if self.low >= self.high or self.beta_slow >= self.beta_fast:
            got = f"low {self.low}, high {self.high}, beta_slow {self.beta_slow}, beta_fast {self.beta_fast}"
            raise ValueError(f"rope_scaling: got {got}; accepted: low < high and beta_slow < beta_fast")


def rope_frequencies(theta: float, d: int, scaling: RopeScaling | None) -> tuple[list[float], float]:
    """The D/2 frequencies, and the factor of cos and sin."""
    plain = [theta ** (-2.0 * i / d) for i in range(d // 2)]
    if scaling is None:
        return plain, 1.0
    s = scaling
    if s.kind == "linear":
        return [f / s.factor for f in plain], 1.0
    if s.kind == "llama3":
        return [_llama3(f, s) for f in plain], 1.0
    fast, slow = (_index_of(rotations, theta, d, s.original) for rotations in (s.beta_fast, s.beta_slow))
    fast, slow = max(math.floor(fast), 0), min(math.ceil(slow), d - 1)
    width = (slow - fast) or 0.001
    shares = [min(max((i - fast) / width, 0.0), 1.0) for i in range(d // 2)]
    blended = [f / s.factor * share + f * (1.0 - share) for f, share in zip(plain, shares, strict=True)]
    return blended, 0.1 * math.log(s.factor) + 1.0 if s.attention_factor is None else s.attention_factor


def _llama3(f: float, s: RopeScaling) -> float:
    wavelength = 2 * math.pi / f
    if wavelength < s.original / s.high:
        return f
    if wavelength > s.original / s.low:
        return f / s.factor
    m = (s.original / wavelength - s.low) / (s.high - s.low)
    return (1 - m) * f / s.factor + m * f


def _index_of(rotations: float, theta: float, d: int, tokens: int) -> float:
    """The fractional i whose angle makes this many rotations in `tokens` tokens."""
    return d * math.log(tokens / (rotations * 2 * math.pi)) / (2 * math.log(theta))
