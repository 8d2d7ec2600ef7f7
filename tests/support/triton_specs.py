"""Calls for the Triton kernels: few specialisations that cover every pair of features, and random sizes for each."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import torch

from support.cases import Case

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
Pair = tuple[tuple[str, object], tuple[str, object]]


@dataclass(frozen=True)
class Spec:
    """One value of every axis."""

    values: tuple[tuple[str, object], ...]

    @property
    def pairs(self) -> set[Pair]:
        return set(itertools.combinations(self.values, 2))

    @property
    def allowed(self) -> bool:
        of = dict(self.values)
        return not (of["packed"] and of["bias"])

    def case(self, dice: random.Random, device: str, *, t: int = 300, small: bool = False) -> Case:
        """Sizes drawn from `dice`; `small` for the interpreter, which has two dtypes and no time."""
        of = dict(self.values)
        d, dv = ((16, 16), (8, 24), (5, 3))[len(str(of["dims"])) % 3] if small else of["dims"]  # type: ignore[misc]
        dtype = torch.float16 if small and of["dtype"] == torch.bfloat16 else of["dtype"]
        few = of["rows"] == "few"
        sizes = {"tq": dice.randint(1, 16) if few else dice.randint(17, t), "tk": dice.randint(50, max(51, t))}
        lengths: tuple[tuple[int, int], ...] = ()
        if of["packed"]:
            top = 16 if few else t
            lengths = tuple((dice.randint(0, top), dice.choice((0, 1, 60, t))) for _ in range(dice.randint(1, 3)))
        return Case(
            b=1 if small else dice.randint(1, 3), hkv=1 if small else dice.randint(1, 2), group=of["group"],  # type: ignore[arg-type]
            d=d, dv=dv, dtype=dtype, causal="causal" in str(of["band"]), window=WINDOWS.get(str(of["band"])),  # type: ignore[arg-type]
            scale=of["scale"], softcap=of["softcap"], bias=str(of["bias"]), alibi=str(of["alibi"]), sinks=bool(of["sinks"]),  # type: ignore[arg-type]
            dropout_p=of["dropout_p"], dlse=bool(of["dlse"]), layout=str(of["layout"]), lengths=lengths, device=device,  # type: ignore[arg-type]
            **sizes,
        )  # fmt: skip


def specs(seed: int = 0) -> list[Spec]:
    """Greedy: of 60 random ones always the one with the most pairs not seen yet, until none is missing."""
    dice = random.Random(seed)

    def draw() -> Spec:
        while True:
            spec = Spec(tuple((axis, dice.choice(values)) for axis, values in AXES.items()))
            if spec.allowed:
                return spec

    missing: set[Pair] = set()
    for (a, xs), (b, ys) in itertools.combinations(AXES.items(), 2):
        missing |= {((a, x), (b, y)) for x in xs for y in ys if not (b == "packed" and a == "bias" and x and y)}
    chosen = []
    while missing:
        best = max((draw() for _ in range(60)), key=lambda spec: len(spec.pairs & missing))
        if best.pairs & missing:
            chosen.append(best)
            missing -= best.pairs
    return chosen
