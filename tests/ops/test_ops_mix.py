"""The mix of two attentions by their logsumexps, compared with attention over both sets of keys."""

from __future__ import annotations

import pytest
import torch
from support.ops import DTYPES, RAGGED, acc, poisoned, randn
from torch import Tensor

from tilegrad.kernels.closeness import Bound, assert_close, roundoff
from tilegrad.kernels.mix import mix_fwd, mix_workspace


def mixed(part: Tensor, part_lse: Tensor, o: Tensor, lse: Tensor) -> dict[str, Tensor]:
    """The mix in float64, as the sum of exponentials of both sets."""
    weights = torch.softmax(torch.stack([lse, part_lse]).double(), 0)
    y = weights[0, ..., None] * o.double() + weights[1, ..., None] * part.double()
    return {"o": y, "lse": torch.logaddexp(lse.double(), part_lse.double())}


def bounds(part: Tensor, part_lse: Tensor, o: Tensor, lse: Tensor, exact: dict[str, Tensor]) -> dict[str, Bound]:
    """Only the result is rounded to the short dtype. A share errs by a times |lse − lse'| and a little; exp by up to 4."""
    a = roundoff(acc(part.dtype)) * (2 if part.dtype == torch.float64 else 1)
    gap = (lse.masked_fill(lse.isinf(), 0.0) - part_lse).double().abs()
    error = (o.double().abs() + part.double().abs()) * (gap + 16)[..., None]
    return {
        "o": Bound(torch.zeros_like(exact["o"]), a * error),
        "lse": Bound(torch.zeros_like(exact["lse"]), a * (exact["lse"].abs() + 16)),
    }


def inputs(t: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Strided inputs: o and lse are every second row. The first row of each head attends to no key."""
    part, part_lse = randn(2, 3, t, 20, dtype=dtype), 4 * randn(2, 3, t, dtype=acc(dtype), seed=1)
    o, lse = randn(2, 2 * t, 3, 20, dtype=dtype, seed=2), 4 * randn(2, 2 * t, 3, dtype=acc(dtype), seed=3)
    o[:, 0], lse[:, 0] = 0.0, -torch.inf
    return part, part_lse, o[:, ::2].transpose(1, 2), lse[:, ::2].transpose(1, 2)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("t", RAGGED)
def test_the_mix_equals_attention_over_both_sets(t: int, dtype: torch.dtype) -> None:
    part, part_lse, o, lse = inputs(t, dtype)
    exact = mixed(part, part_lse, o, lse)
    bound = bounds(part, part_lse, o, lse, exact)
    mix_fwd(part, part_lse, o=o, lse=lse, scratch=poisoned(mix_workspace(part)))
    assert_close({"o": o, "lse": lse}, exact, bound)
    assert torch.equal(o[:, :, 0], part[:, :, 0]) and torch.equal(lse[:, :, 0], part_lse[:, :, 0])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["o", "lse"])
def test_canary_a_factor_of_a_mix_is_seen(name: str, dtype: torch.dtype) -> None:
    part, part_lse, o, lse = inputs(63, dtype)
    exact = mixed(part, part_lse, o, lse)
    bound = bounds(part, part_lse, o, lse, exact)
    mix_fwd(part, part_lse, o=o, lse=lse, scratch=poisoned(mix_workspace(part)))
    got = {"o": o, "lse": lse}
    got[name] = got[name] * (1.005 if got[name].dtype == torch.bfloat16 else 1.0001)
    with pytest.raises(AssertionError, match=f"{name}: "):
        assert_close(got, exact, bound)


def test_errors_of_a_mix_name_the_argument() -> None:
    part, part_lse, o, lse = inputs(4, torch.float32)
    with pytest.raises(ValueError, match=r"part_lse: got torch\.float64"):
        mix_fwd(part, part_lse.double(), o=o, lse=lse)
    with pytest.raises(ValueError, match=r"o: got torch.float32 \(2, 3, 3, 20\)"):
        mix_fwd(part, part_lse, o=o[:, :, 1:], lse=lse)
    with pytest.raises(ValueError, match="o: got strides"):
        mix_fwd(part, part_lse, o=torch.empty(2, 3, 20, 4).mT, lse=lse)
