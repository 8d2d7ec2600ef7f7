"""The settings with which the tokens of a sequence are drawn. The equations are in kernels/sampling.

>>> Sampling(temperature=0.8, top_k=50).row()
(0.800000011920929, 50.0, 1.0, 0.0, 1.0)
>>> Sampling(top_p=0)
Traceback (most recent call last):
ValueError: top_p: got 0; accepted: a number in (0, 1], 1 = all
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from ..kernels.checks import is_count, is_number
from ..kernels.sampling import MOST_TOKENS
from .batch import check_seed

_LARGEST, _TINY = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature 0 takes the largest logit. top_k None, top_p 1, min_p 0 and repetition_penalty 1 change nothing."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        t, k, p, min_p, penalty = self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty
        most = sys.float_info.max
        for name, valid, accepted in (
            ("temperature", is_number(t) and 0.0 <= t <= most, "a finite number ≥ 0, 0 = always the likeliest"),
            ("top_k", k is None or is_count(k), "None or an int ≥ 1"),
            ("top_p", is_number(p) and 0.0 < p <= 1.0, "a number in (0, 1], 1 = all"),
            ("min_p", is_number(min_p) and 0.0 <= min_p <= 1.0, "a number in [0, 1], 0 = all"),
            ("repetition_penalty", is_number(penalty) and 0 < penalty <= most, "a finite number > 0, 1 = no penalty"),
        ):
            if not valid:
                raise ValueError(f"{name}: got {getattr(self, name)!r}; accepted: {accepted}")
        check_seed(self.seed)

    def row(self) -> tuple[float, float, float, float, float]:
        """The settings as `sample_fwd` reads them, rounded to float32. A temperature or repetition_penalty above the largest
        float32 becomes the largest float32. A top_p or repetition_penalty below the smallest normal float32 becomes that
        smallest float32, so that it stays positive. A temperature below the smallest normal float32 becomes 0."""
        temperature = _float32(self.temperature) if self.temperature >= _TINY else 0.0
        top_k = 0.0 if self.top_k is None else float(min(self.top_k, MOST_TOKENS))
        top_p, penalty = _float32(self.top_p), _float32(self.repetition_penalty)
        return temperature, top_k, top_p, float(np.float32(self.min_p)), penalty

    @property
    def has_penalty(self) -> bool:
        """Whether sampling reads which tokens a sequence contains."""
        return self.repetition_penalty != 1.0


def _float32(x: float) -> float:
    return float(np.float32(min(max(x, _TINY), _LARGEST)))
