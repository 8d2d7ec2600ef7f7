"""`Sampling`: its checks, and that the op accepts its numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.ops import poisoned

from tilegrad.engine.sampling import Sampling
from tilegrad.kernels.philox import signed
from tilegrad.kernels.sampling import sample_fwd, sample_workspace


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -0.1}, "temperature: got -0.1; accepted: a finite number ≥ 0, 0 = always the likeliest"),
        ({"temperature": math.nan}, "temperature: got nan"),
        ({"temperature": math.inf}, "temperature: got inf"),
        ({"temperature": True}, "temperature: got True"),
        ({"temperature": "1"}, "temperature: got '1'"),
        ({"top_k": 0}, "top_k: got 0; accepted: None or an int ≥ 1"),
        ({"top_k": 2.0}, "top_k: got 2.0"),
        ({"top_k": True}, "top_k: got True"),
        ({"top_p": 0}, r"top_p: got 0; accepted: a number in \(0, 1\], 1 = all"),
        ({"top_p": 1.01}, "top_p: got 1.01"),
        ({"top_p": math.nan}, "top_p: got nan"),
        ({"top_p": True}, "top_p: got True"),
        ({"min_p": -0.1}, r"min_p: got -0.1; accepted: a number in \[0, 1\], 0 = all"),
        ({"min_p": 1.5}, "min_p: got 1.5"),
        ({"min_p": False}, "min_p: got False"),
        ({"repetition_penalty": 0}, "repetition_penalty: got 0; accepted: a finite number > 0, 1 = no penalty"),
        ({"repetition_penalty": math.inf}, "repetition_penalty: got inf"),
        ({"repetition_penalty": True}, "repetition_penalty: got True"),
        (
            {"seed": 1 << 64},
            "seed: got 18446744073709551616; accepted: an int, −2⁶³ … 2⁶⁴ − 1, as torch.Generator takes",
        ),
        ({"seed": -(1 << 63) - 1}, "seed: got -9223372036854775809"),
        ({"seed": 1.0}, "seed: got 1.0"),
        ({"seed": True}, "seed: got True"),
    ],
)
def test_bad_settings_of_sampling_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**given)


def test_seeds_have_64_bits() -> None:
    assert signed(Sampling(seed=(1 << 64) - 1).seed) == -1 == signed(Sampling(seed=-1).seed)
    assert signed(Sampling(seed=1 << 63).seed) == -(1 << 63) == signed(Sampling(seed=-(1 << 63)).seed)
    assert signed(Sampling(seed=(1 << 63) - 1).seed) == (1 << 63) - 1


def test_the_op_accepts_every_accepted_setting() -> None:
    """The numbers include some that float32 cannot represent, and the ends of the ranges."""
    some = [
        Sampling(),
        Sampling(temperature=1e-300, top_k=1 << 40, top_p=1e-300, min_p=1e-300, repetition_penalty=1e-300),
        Sampling(temperature=1e300, top_p=1 - 1e-12, min_p=1, repetition_penalty=1e300),
        Sampling(temperature=0, top_k=1, top_p=1, min_p=0),
    ]
    assert some[1].row()[0] == 0.0 and some[1].row()[2] > 0 and some[2].row()[2] == 1.0
    assert some[0].row() == (1.0, 0.0, 1.0, 0.0, 1.0)
    n, v = len(some), 5
    settings, logits = torch.tensor([one.row() for one in some]), torch.linspace(-1, 1, v).repeat(n, 1)
    seeds, zero = torch.tensor([signed(one.seed) for one in some]), torch.zeros(n, dtype=torch.int64)
    tokens, logprobs, seen = torch.empty(n, dtype=torch.int64), torch.empty(n), torch.ones(n, v, dtype=torch.uint8)
    scratch = poisoned(sample_workspace(logits))
    sample_fwd(logits, settings, seeds, zero, zero, tokens=tokens, logprobs=logprobs, seen=seen, scratch=scratch)
    assert bool(((tokens >= 0) & (tokens < v)).all()) and int(tokens[3]) == 4
