"""Calls for the Triton kernels: few specifications that cover every pair of features, and random sizes for each."""

from __future__ import annotations

import functools
import random

import torch

from support.cases import Case
from support.pairwise import Spec, covering

AXES: dict[str, tuple[object, ...]] = {
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "dims": ((64, 64), (128, 128), (40, 24), (256, 256), (97, 5)),
    "group": (1, 3),
    "band": ("", "causal", "window", "left", "causal window"),
    "bias": ("", "bhqk", "hk", "qk", "h", "BHQK", "BK"),
    "alibi": ("", "h", "bh"),
    "softcap": (0.0, 2.0),
    "sinks": (False, True),
    "dropout_p": (0.0, 0.25),
    "dlse": (False, True),
    "layout": ("bhtd", "bthd", "fused"),
    "scale": (None, -0.2),
    "packed": (False, True),
    "rows": ("many", "few"),
}
WINDOWS = {"window": (40, 7), "left": (33, None), "causal window": (25, 30)}


def allowed(spec: Spec) -> bool:
    """Packed sequences have no bias."""
    return not (spec.get("packed") and spec.get("bias"))


@functools.cache
def specs() -> tuple[Spec, ...]:
    return tuple(covering(AXES, allowed))


def case_of(spec: Spec, dice: random.Random, device: str, *, t: int = 300, small: bool = False) -> Case:
    """A case with sizes drawn from `dice`, `small` ones for the interpreter, which is slow."""
    d, dv = ((16, 16), (8, 24), (5, 3))[len(str(spec["dims"])) % 3] if small else spec["dims"]
    few = spec["rows"] == "few"
    tq, tk = dice.randint(1, 16) if few else dice.randint(17, t), dice.randint(50, max(51, t))
    lengths: tuple[tuple[int, int], ...] = ()
    if spec["packed"]:
        top = 16 if few else t
        lengths = tuple((dice.randint(0, top), dice.choice((0, 1, 60, t))) for _ in range(dice.randint(1, 3)))
    return Case(
        b=1 if small else dice.randint(1, 3), hkv=1 if small else dice.randint(1, 2), group=spec["group"],
        d=d, dv=dv, dtype=spec["dtype"], causal="causal" in str(spec["band"]), window=WINDOWS.get(str(spec["band"])),
        scale=spec["scale"], softcap=spec["softcap"], bias=str(spec["bias"]), alibi=str(spec["alibi"]),
        sinks=bool(spec["sinks"]), dropout_p=spec["dropout_p"], dlse=bool(spec["dlse"]), layout=str(spec["layout"]),
        lengths=lengths, device=device, tq=tq, tk=tk,
    )  # fmt: skip
