"""The one closeness rule of the suite.

With error(y) = max|y − x64| against the float64 oracle x64:

    error(x) ≤ 2 · error(yardstick) + 4 · eps(dtype) · max|x64|
    error(x) ≤ 64 · eps(float64) · max over the call's tensors of |x64|          for float64

where the yardstick is the oracle's own formula run as whole-matrix torch ops in the input's dtype, and dtype is the
input's, or x's own where that is coarser (a float32 bias of a float64 call). Infinities must stand in the same places,
NaN nowhere. float64 has no yardstick (it would be the oracle), so its floor is measured against the terms that cancel in
dq and dk, which are as large as the call's largest tensor; a shorter dtype is measured so only where x vanishes in exact
arithmetic (dq where each row sees one key). A tensor of a few numbers (dsinks, one sum per head) has too few errors for
their maximum to mean much, and its terms may cancel by luck: its max|x64| counts as at least 1/64 of the call's largest.
These exceptions are used: with x's own max|x64| throughout, 25 of 2,000 random calls of the tiled kernel are red, most of
them gradients that vanish.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

VANISHED = 1e-12
FEW = 64


def _largest(x: Tensor) -> float:
    finite = x[torch.isfinite(x)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _error(x: Tensor, x64: Tensor) -> float:
    return _largest(x.double() - x64)


def allowed_error(x64: Tensor, yardstick: Tensor, dtype: torch.dtype, largest: float) -> float:
    """`largest` is max|x64| over the call's tensors."""
    eps, scale = torch.finfo(dtype).eps, _largest(x64)
    if dtype == torch.float64:
        return 64 * eps * largest
    if scale <= VANISHED * largest:
        scale = largest
    elif x64.numel() < FEW:
        scale = max(scale, largest / FEW)
    return 2 * _error(yardstick, x64) + 4 * eps * scale


def assert_no_worse(
    got: Mapping[str, Tensor], exact: Mapping[str, Tensor], yardstick: Mapping[str, Tensor], dtype: torch.dtype
) -> None:
    """Every tensor of a call under the rule above."""
    assert got.keys() == exact.keys()
    largest = max(map(_largest, exact.values()))
    for name, x in got.items():
        x64 = exact[name]
        assert x.shape == x64.shape, f"{name}: shape {tuple(x.shape)}, not {tuple(x64.shape)}"
        assert not x.isnan().any(), f"{name}: NaN"
        assert torch.equal(x.isinf(), x64.isinf()), f"{name}: infinities stand elsewhere"
        coarser = max(dtype, x.dtype, key=lambda d: torch.finfo(d).eps)
        error, allowed = _error(x, x64), allowed_error(x64, yardstick[name], coarser, largest)
        assert error <= allowed, f"{name}: error {error:.3e} > {allowed:.3e} ({coarser})"
