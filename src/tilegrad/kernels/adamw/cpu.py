"""AdamW on lean states in C++ (cpu/csrc/rows/adamw.cpp), with the bits of torch_ops.py: one pass over each range."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..cpu.abi import pack_lean_adamw
from ..cpu.library import isa, native
from ..cpu.rows import DTYPES, address
from ..scratch import Scratch, Shapes, TensorLike
from .torch_ops import SCALARS, lean_scalars

if TYPE_CHECKING:
    from . import Range, Update


def workspace(params: TensorLike, lean: bool = False) -> Shapes:
    return {"exact": ((len(SCALARS),), torch.float64), "scalars": ((len(SCALARS),), torch.float32)}


def step(update: Update, *, ranges: Sequence[Range], step: Tensor, scratch: Scratch) -> None:
    lean_scalars(update, step, scratch)
    if not update.norm.isfinite():
        return
    shared = (int(step), 0 if update.seed is None else int(update.seed), torch.get_num_threads(), isa())
    for each in ranges:
        for part, first in each.parts():
            dtypes = (DTYPES[x.dtype] for x in (part.params, part.grads, part.m))
            tensors = map(address, (part.params, part.grads, part.m, part.v, part.rounded, scratch["scalars"][1:]))
            call = pack_lean_adamw(len(part.params), part.decayed, first, *shared, *dtypes, *tensors)
            native().tilegrad_native_lean_adamw(call)
