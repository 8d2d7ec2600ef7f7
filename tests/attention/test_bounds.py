"""Attention's error bounds have the numbers written here: a bound that changes by a millionth fails a test.

A kernel that passes shows that its bounds are wide enough, and a canary that they are narrow enough to see a factor. Here are
the numbers themselves: for calls that together have every feature, the geometric means of σ and of a B of each output (over
numbers other than 0), and the slope's deviation. A change of the formulas must write new numbers here.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.cases import Call, Case, bounds, build, oracle
from torch import Tensor

from tilegrad.kernels.attention import bounds as module

ALL = Case(
    b=2, hkv=2, group=2, tq=5, tk=7, d=3, dv=2, dtype=torch.bfloat16, causal=True, window=(4, None), scale=-0.7, softcap=1.5,
    bias="hqk", alibi="bh", sinks=True, dropout_p=0.25, dlse=True,
)  # fmt: skip
CASES = {
    "all": ALL,
    "plain, float64": Case(b=1, hkv=1, tq=4, tk=5, d=3, dv=2, dtype=torch.float64),
    "a bias for each row": replace(ALL, bias="q", window=None, causal=False, dtype=torch.float16, softcap=0.0),
    "packed": replace(ALL, bias="", lengths=((3, 4), (5, 2), (1, 1))),
    "an exp of few bits": replace(ALL, bias="bk", dtype=torch.float32, causal=False),
    "rows that see nothing": replace(ALL, b=3, hkv=1, group=1, tq=6, tk=3, bias="bhqk", dropout_p=0.0, sinks=False),
    "a bias of one number": Case(b=1, hkv=1, tq=3, tk=4, d=3, dv=2, bias="1"),
    "large scores": Case(b=1, hkv=1, tq=6, tk=9, d=5, dv=4, causal=True, scores=1e6),
    "flushed": Case(b=1, hkv=1, tq=2, tk=120, d=3, dv=2, bias="k"),
    "flushed, a small do": Case(b=1, hkv=1, tq=2, tk=120, d=3, dv=2, bias="k"),
}
PINNED: dict[str, dict[str, tuple[float, ...]]] = {
    "all": {
        "o": (5.9596353e-04, 5.7016237e-07, 1.2945523e-02),
        "lse": (0.0, 1.3528093e-06, 0.0),
        "dq": (4.0928274e-04, 6.6918383e-07, 1.7282461e-02),
        "dk": (5.4342541e-04, 5.9867381e-07, 1.8695832e-02),
        "dv": (8.2082641e-04, 7.2239861e-07, 1.8596464e-02),
        "dbias": (2.2726059e-04, 4.3153447e-07, 8.5324037e-03),
        "dsinks": (2.2811763e-03, 2.7977261e-06),
    },
    "plain, float64": {
        "o": (2.5554578e-17, 2.5733634e-15, 5.4565328e-17),
        "lse": (0.0, 4.2762184e-15, 0.0),
        "dq": (7.7741804e-18, 1.1968186e-15, 7.1865268e-18),
        "dk": (9.3080776e-18, 9.5414249e-16, 9.1712529e-18),
        "dv": (1.5826709e-17, 1.4926240e-15, 3.4985271e-17),
    },
    "a bias for each row": {
        "o": (7.8947424e-05, 5.3870023e-07, 2.0766862e-03),
        "lse": (0.0, 1.2318767e-06, 0.0),
        "dq": (9.6847299e-05, 9.4828895e-07, 6.0087031e-03),
        "dk": (1.3695342e-04, 9.7175816e-07, 4.5080635e-03),
        "dv": (1.0762343e-04, 7.2987522e-07, 1.3966015e-03),
        "dbias": (6.6095414e-04, 7.8397641e-06, 8.9100515e-03),
        "dsinks": (1.1386107e-04, 1.3209701e-06),
    },
    "packed": {
        "o": (6.3718670e-04, 4.5888353e-07, 8.3821327e-03),
        "lse": (0.0, 8.3385342e-07, 0.0),
        "dq": (3.3958619e-04, 4.5287270e-07, 1.0120487e-02),
        "dk": (7.4697121e-04, 6.9614303e-07, 1.5757952e-02),
        "dv": (1.2179220e-03, 9.5168936e-07, 1.4728041e-02),
        "dsinks": (1.0182312e-03, 3.9739323e-06),
    },
    "an exp of few bits": {
        "o": (8.0284780e-09, 1.0421364e-06, 1.7789035e-07),
        "lse": (0.0, 3.5511620e-06, 0.0),
        "dq": (6.3328875e-09, 1.1866504e-06, 2.1993083e-07),
        "dk": (7.7197151e-09, 1.0680062e-06, 2.2416084e-07),
        "dv": (1.2346551e-08, 1.7382640e-06, 4.4065573e-07),
        "dbias": (1.4100874e-08, 4.3470280e-06, 7.2749605e-07),
        "dsinks": (7.3335729e-09, 1.5778837e-06),
    },
    "rows that see nothing": {
        "o": (1.1404635e-03, 5.4166642e-07, 1.6382410e-02),
        "lse": (0.0, 8.6085190e-07, 0.0),
        "dq": (5.6218387e-04, 5.0185165e-07, 4.0533144e-03),
        "dk": (1.6926134e-04, 1.2331435e-07, 2.9609733e-03),
        "dv": (6.3709498e-04, 5.1248568e-07, 3.9171523e-02),
        "dbias": (6.7633193e-04, 6.0832100e-07, 4.9275898e-03),
    },
    "a bias of one number": {
        "o": (1.5082507e-08, 6.4235440e-07, 2.5084038e-08),
        "lse": (0.0, 1.0976337e-06, 0.0),
        "dq": (9.0264532e-09, 5.8825635e-07, 1.2345045e-08),
        "dk": (1.2022515e-08, 5.6945043e-07, 1.8935421e-08),
        "dv": (1.4972939e-08, 6.5197907e-07, 4.1352043e-08),
        "dbias": (5.2223719e-08, 2.7233652e-06, 1.7393993e-23),
    },
    "large scores": {
        "o": (1.8499832e-08, 6.6318473e-07, 5.7990068e-07),
        "lse": (0.0, 1.1987392e00, 0.0),
        "dq": (3.2063258e-05, 1.3228317e-03, 0.0),
        "dk": (4.2119117e-05, 1.4350622e-03, 0.0),
        "dv": (2.6512338e-08, 1.4156957e-06, 8.0827966e-07),
    },
    "flushed": {
        "o": (2.0058037e-08, 2.3134953e-06, 3.9980170e-08),
        "lse": (0.0, 2.5541373e-06, 0.0),
        "dq": (4.6184211e-09, 6.5374308e-07, 1.3736637e-09),
        "dk": (2.6847846e-32, 2.0320143e-30, 1.9321705e-09),
        "dv": (1.7154734e-32, 1.7868040e-30, 1.2403070e-08),
        "dbias": (2.9932584e-34, 3.3812076e-30, 1.1507776e-09),
    },
    "flushed, a small do": {
        "o": (2.0058037e-08, 2.3134953e-06, 3.9980170e-08),
        "lse": (0.0, 2.5541373e-06, 0.0),
        "dq": (4.6184210e-34, 6.5374315e-32, 1.3736637e-59),
        "dk": (1.5775298e-44, 5.6436956e-53, 1.9321704e-59),
        "dv": (1.7154733e-57, 2.4836465e-53, 1.2403071e-58),
        "dbias": (2.9932583e-59, 7.8758762e-53, 1.1507776e-59),
    },
}


def call_of(name: str) -> Call:
    """The call of a name. Where p is to be flushed, ALiBi makes p of far columns small; −∞ in a bias is a mask."""
    call = build(CASES[name])
    if name == "rows that see nothing":
        assert call.mask.bias is not None and call.dlse is not None
        call.mask.bias[:, :, 4, 1] = -torch.inf
        call.dlse[:, :, :3] = torch.inf
    if name == "flushed, a small do":
        call.do.mul_(1e-25)
    return replace(call, mask=replace(call.mask, alibi_slopes=torch.ones(1))) if "flushed" in name else call


def measured(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[float, ...]]:
    monkeypatch.setattr(module, "_flushes", lambda _q: "flushed" in name)
    call = call_of(name)

    def mean(x: Tensor) -> float:
        return float(x[x > 0].log().mean().exp()) if x.any() else 0.0

    found = bounds(call, oracle(call), 1e-6 if name == "an exp of few bits" else 0.0)
    return {output: tuple(mean(x) for x in bound if x is not None) for output, bound in found.items()}


@pytest.mark.parametrize("name", CASES)
def test_bounds_equal_the_pinned_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(name, monkeypatch)
    assert found.keys() == PINNED[name].keys()
    for output, numbers in found.items():
        assert numbers == pytest.approx(PINNED[name][output], rel=1e-6, abs=1e-20), (
            output
        )  # below it a sum that is 0 in exact numbers


@pytest.mark.parametrize("name", CASES)
def test_bounds_have_the_shapes_of_the_outputs(name: str) -> None:
    exact = oracle(call_of(name))
    for output, bound in bounds(call_of(name), exact).items():
        assert bound.sigma.shape == bound.accumulated.shape == exact[output].shape, output
