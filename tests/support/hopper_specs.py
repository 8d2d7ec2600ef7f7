"""Calls for the Hopper kernels: few specifications that cover every pair of features, and random sizes for each."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import torch

from support.cases import Case
from support.pairwise import Spec, covering

AXES: dict[str, tuple[object, ...]] = {
    "dtype": (torch.bfloat16, torch.float16),
    "d": (64, 128, 256, 96, 192, 40, 72, 160, 16, 80, 136),
    "group": (1, 3),
    "band": ((False, None), (True, None), (False, (40, 7)), (False, (90, None)), (True, (130, None))),
    "softcap": (0.0, 0.0, 2.0),
    "scale": (None, None, -0.2),
    "sinks": (False, True),
    "dlse": (False, True),
    "layout": ("bhtd", "bthd", "fused"),
    "packed": (False, False, True),
    "deterministic": (False, True),
}
LONGEST, LEAST = 420, 17  # triton takes calls with fewer rows


@functools.cache
def specs() -> tuple[Spec, ...]:
    return tuple(covering(AXES))


def case_of(spec: Spec, dice: random.Random, longest: int = LONGEST) -> Case:
    """A case with sizes drawn from `dice`."""
    d, (causal, window) = spec["d"], spec["band"]
    lengths: tuple[tuple[int, int], ...] = ()
    if spec["packed"]:
        some = ((dice.randint(0, longest), dice.choice((0, 1, 60, longest))) for _ in range(dice.randint(0, 3)))
        lengths = ((dice.randint(LEAST, longest), dice.randint(1, 4 * LEAST)), *some)
    return Case(
        b=dice.randint(1, 3), hkv=dice.randint(1, 2), group=spec["group"], d=d, dv=d,
        tq=dice.randint(LEAST, longest), tk=dice.choice((1, 64, dice.randint(1, 4 * LEAST), dice.randint(1, longest))),
        dtype=spec["dtype"], causal=causal, window=window, softcap=spec["softcap"], scale=spec["scale"],
        sinks=spec["sinks"], dlse=spec["dlse"], layout=spec["layout"], lengths=lengths, device="cuda",
    )  # fmt: skip


def _few_rows(case: Case) -> bool:
    """Whether the table leaves the call to triton: few rows, many columns."""
    tq = max(q for q, _ in case.lengths) if case.lengths else case.tq
    tk = max(k for _, k in case.lengths) if case.lengths else case.tk
    return 4 * tq <= tk


def case_for_hopper(spec: Spec, dice: random.Random, longest: int = LONGEST) -> Case:
    """A case that the table gives to the Hopper kernels."""
    case = case_of(spec, dice, longest)
    if _few_rows(case):
        return replace(case, tk=case.tq, lengths=tuple((q, min(q, k)) for q, k in case.lengths))
    return case
