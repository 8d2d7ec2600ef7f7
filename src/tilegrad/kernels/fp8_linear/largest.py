"""The largest magnitude of each float8 tensor in one buffer, over which ranks take a maximum before `fp8_scale_step`.

largest (S,)   largest[i] = max of the magnitudes in states[i]          states[i]: PARTS magnitudes next to each other
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..checks import check_tensor
from .state import FIRST_PART, PARTS


def largest_of(states: Sequence[Tensor], *, largest: Tensor) -> None:
    """largest[i] = the largest magnitude in states[i]; a NaN counts as infinite, so that no maximum loses it."""
    torch.amax(_magnitudes(states, largest), 1, out=largest)
    largest.nan_to_num_(nan=torch.inf, posinf=torch.inf)


def set_largest(largest: Tensor, *, states: Sequence[Tensor]) -> None:
    """Replaces the magnitudes in states[i] by one, largest[i]."""
    magnitudes = _magnitudes(states, largest)
    magnitudes.zero_()
    magnitudes[:, 0].copy_(largest)


def _magnitudes(states: Sequence[Tensor], largest: Tensor) -> Tensor:
    """(S, PARTS), a view of all states: one kernel reads or writes them."""
    first = states[0]
    check_tensor("largest", largest, (len(states),), torch.float32, first.device)
    spacings = {(b.data_ptr() - a.data_ptr()) // a.element_size() for a, b in pairwise(states)}
    one_storage = {state.untyped_storage().data_ptr() for state in states}
    if len(spacings) > 1 or len(one_storage) > 1:
        raise ValueError("states: got tensors that are not equally spaced; accepted: those of one arena")
    row = spacings.pop() if spacings else PARTS
    return first.as_strided((len(states), PARTS), (row, 1), first.storage_offset() + FIRST_PART)
