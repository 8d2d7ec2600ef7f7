"""Sampling in C++ (cpu/csrc/rows/sampling.cpp), one thread for each row. A key is the bits of y or of e. Histograms of the
tokens' masses find the smallest kept key, 11 bits at a time. Noise is drawn for the kept tokens only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..cpu.abi import pack_sample
from ..cpu.library import NativeCall, isa, native, run_native
from ..cpu.rows import address, rows
from ..scratch import Scratch, Shapes, TensorLike
from .elementary import mass_bits

if TYPE_CHECKING:
    from . import Draws


def workspace(logits: TensorLike, *, draw: bool) -> Shapes:
    n, v = logits.shape
    return {"numbers": ((n, v), torch.float32), "places": ((n, 2 * v), torch.int32)} if draw else {}


def fwd(
    logits: Tensor, draws: Draws, *, tokens: Tensor, logprobs: Tensor, seen: Tensor | None, scratch: Scratch
) -> NativeCall:
    matrices = rows(logits), rows(seen), rows(scratch["numbers"]), rows(scratch["places"])
    vectors = map(address, (*draws, tokens, logprobs))
    return run_native(native().tilegrad_native_sample, pack_sample(*_shared(logits), *matrices, *vectors))


def logprobs(logits: Tensor, targets: Tensor, *, logprobs: Tensor, scratch: Scratch) -> None:
    call = pack_sample(*_shared(logits), rows(logits), tokens=targets.data_ptr(), logprobs=logprobs.data_ptr())
    native().tilegrad_native_sample(call)


def _shared(logits: Tensor) -> tuple[int, ...]:
    n, v = logits.shape
    return n, v, torch.get_num_threads(), isa(), mass_bits(v)
