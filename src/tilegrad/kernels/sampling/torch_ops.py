"""Sampling by torch ops on any device, a block of rows at a time. On CUDA the host reads nothing, so a step can be captured.

Unlike the other kernels, this one sorts y for top_k and e for top_p. torch.sort allocates memory, 8 · V bytes on a CPU. On a
CPU a sort that no row needs is skipped. Every operation is rounded once, or is on integers. So a row's bits do not depend on
other rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..philox import WORK_BUFFERS, philox, round_keys_of_rows
from ..scratch import Scratch, Shapes, TensorLike, blocks, rows_of, rows_per_block
from .elementary import CONSTANTS, exp_, log_, mass_bits

if TYPE_CHECKING:
    from . import Draws

BLOCK = {"cpu": 1 << 16, "cuda": 1 << 22}  # elements processed at once


def workspace(logits: TensorLike, *, draw: bool) -> Shapes:
    v, rows, dtype = logits.shape[1], rows_per_block(logits, BLOCK), logits.dtype
    shapes: Shapes = {
        "numbers": ((5 if draw else 3, rows, v), dtype),
        "bits": ((rows, v), CONSTANTS[dtype].integer),
        "masses": ((rows, v), torch.int64),
        "flags": ((1, rows, v), torch.bool),
        "row_numbers": ((4, rows), torch.float64),
        "row_tops": ((3, rows), dtype),
        "row_integers": ((3, rows), torch.int64),
        "row_flags": ((rows,), torch.bool),
    }
    if draw:
        shapes |= {"philox": ((WORK_BUFFERS, rows, v), torch.int64), "index": ((v,), torch.int64)}
        shapes |= {"noise": ((3, rows, v), torch.float32), "noise_bits": ((rows, v), torch.int32)}
        shapes |= {
            "row_old": ((2, rows), torch.int64),
            "row_old_logprob": ((rows,), dtype),
            "row_idle": ((rows,), torch.bool),
        }
    return shapes


def logprobs(logits: Tensor, targets: Tensor, *, logprobs: Tensor, scratch: Scratch) -> None:
    for i in blocks(logits.shape[0], rows_per_block(logits, BLOCK)):
        _logprobs(rows_of(logits, i), targets[i], _part(scratch, i), out=logprobs[i])


def fwd(
    logits: Tensor, draws: Draws, *, tokens: Tensor, logprobs: Tensor, seen: Tensor | None, scratch: Scratch
) -> None:
    settings, seeds, sequences, drawn = draws
    for i in blocks(logits.shape[0], rows_per_block(logits, BLOCK)):
        part, l = _part(scratch, i), rows_of(logits, i)
        (old_token, count), old_logprob, idle = part["row_old"], part["row_old_logprob"], part["row_idle"]
        old_token.copy_(tokens[i])
        old_logprob.copy_(logprobs[i])
        torch.lt(drawn[i], 0, out=idle)
        noise = _noise(seeds[i], sequences[i], torch.clamp(drawn[i], min=0, out=count), part)
        _draw(l, settings[i], None if seen is None else seen[i], noise, part, token=tokens[i])
        bad = _logprobs(l, tokens[i], part, out=logprobs[i])
        tokens[i].masked_fill_(bad, -1)
        logprobs[i].masked_fill_(bad, 0.0)
        bad.logical_or_(idle)
        if seen is not None:  # the flags of a row without a new token do not change
            one, at = part["bits"].view(torch.uint8)[:, :1], torch.clamp(tokens[i], min=0, out=part["row_integers"][0])
            torch.gather(seen[i], 1, at[:, None], out=one)
            one.bitwise_or_(torch.logical_not(bad, out=bad)[:, None])
            seen[i].scatter_(1, at[:, None], one)
        torch.where(idle, old_token, tokens[i], out=tokens[i])
        torch.where(idle, old_logprob, logprobs[i], out=logprobs[i])


def _part(scratch: Scratch, i: slice) -> Scratch:
    """The buffers of i.stop − i.start rows."""
    m, out = i.stop - i.start, {}
    for name, x in scratch.items():
        axis = x.ndim - (1 if name.startswith("row_") else 2)
        if name == "index" or x.shape[axis] == m:
            out[name] = x
        else:
            shape = (*x.shape[:axis], m, *x.shape[axis + 1 :])
            out[name] = x.view(-1)[: x.numel() // x.shape[axis] * m].view(shape)
    return out


def _logprobs(l: Tensor, targets: Tensor, part: Scratch, *, out: Tensor) -> Tensor:
    """Writes out (m,). Returns the mask of rows with a NaN or a +inf, or with only −inf."""
    x, work, bad, masses = part["numbers"][0], part["numbers"][1:3], part["row_flags"], part["masses"]
    (top, of_target, _), (a, b, *rest) = part["row_tops"], part["row_numbers"]
    total, index, integers = part["row_integers"]
    torch.amax(l, 1, out=top)
    exp_(torch.sub(l, top[:, None], out=x), work, part["bits"], part["flags"][0])
    masses.copy_(x.mul_(2.0 ** mass_bits(l.shape[1])).add_(0.5))
    a.copy_(torch.sum(masses, 1, out=total)).mul_(2.0 ** -mass_bits(l.shape[1]))
    log_(a, part["row_numbers"][2:], integers)
    torch.clamp(targets, min=0, out=index)
    torch.gather(l, 1, index[:, None], out=of_target[:, None])
    b.copy_(of_target).sub_(rest[0].copy_(top)).sub_(a)
    out.copy_(b)
    torch.ne(torch.sub(top, top, out=of_target), 0.0, out=bad)
    out.masked_fill_(bad, torch.nan)
    torch.lt(targets, 0, out=part["flags"][0, :, 0])
    out.masked_fill_(part["flags"][0, :, 0], 0.0)
    return bad


def _draw(l: Tensor, settings: Tensor, seen: Tensor | None, noise: Tensor, part: Scratch, *, token: Tensor) -> None:
    """token (m,) = argmax of z + noise over the kept tokens."""
    y, z, e = part["numbers"][:3]
    work, flags, greedy = part["numbers"][3:], part["flags"][0], part["row_flags"]
    temperature, top_k, top_p, min_p, penalty = settings.unbind(1)
    top, divisor, smallest = part["row_tops"]
    if seen is None:
        y.copy_(l)
    else:
        _penalise(l, seen, divisor.copy_(penalty), y, work, flags)
    torch.amax(y, 1, out=top)
    divisor.copy_(temperature).masked_fill_(torch.eq(temperature, 0.0, out=greedy), 1.0)
    torch.sub(y, top[:, None], out=z).div_(divisor[:, None])
    noise.masked_fill_(greedy[:, None], 0.0)

    if _needed(top_k, 0.0):
        _smallest_of_top_k(y, top_k, part, out=smallest)
        z.masked_fill_(torch.lt(y, smallest[:, None], out=flags), -torch.inf)
    exp_(e.copy_(z), work, part["bits"], flags)
    if _needed(top_p, 1.0):
        _smallest_of_top_p(e, top_p, part, out=smallest)
        z.masked_fill_(torch.lt(e, smallest[:, None], out=flags), -torch.inf)
    z.masked_fill_(torch.lt(e, smallest.copy_(min_p)[:, None], out=flags), -torch.inf)
    torch.argmax(z.add_(noise), 1, out=token)


def _needed(setting: Tensor, none: float) -> bool:
    """Whether to sort: on a CPU only if a row uses the setting; on a GPU always, because reading it would synchronize."""
    return setting.device.type != "cpu" or bool((setting != none).any())


def _smallest_of_top_k(y: Tensor, top_k: Tensor, part: Scratch, *, out: Tensor) -> None:
    """out (m,) = the top_k-th largest of y; −inf if top_k is 0."""
    ordered, index = part["numbers"][3], part["row_integers"][0]
    torch.sort(y, 1, descending=True, out=(ordered, part["masses"]))
    index.copy_(top_k).sub_(1).clamp_(0, y.shape[1] - 1)
    torch.gather(ordered, 1, index[:, None], out=out[:, None])
    out.masked_fill_(torch.eq(top_k, 0.0, out=part["flags"][0, :, 0]), -torch.inf)


def _smallest_of_top_p(e: Tensor, top_p: Tensor, part: Scratch, *, out: Tensor) -> None:
    """out (m,) = the smallest e for which the larger ones have less than top_p of the mass; at most 1; 0 if top_p is 1."""
    (ordered, scaled), masses, before = part["numbers"][3:], part["masses"], part["philox"][0]
    (bound, factor, *_), above, flags = part["row_numbers"], part["philox"][1].view(torch.float64), part["flags"][0]
    torch.sort(e, 1, descending=True, out=(ordered, masses))
    masses.copy_(torch.mul(ordered, 2.0 ** mass_bits(e.shape[1]), out=scaled).add_(0.5))
    above.copy_(torch.cumsum(masses, 1, out=before).sub_(masses))
    bound.copy_(torch.sum(masses, 1, out=part["row_integers"][0])).mul_(factor.copy_(top_p))
    ordered.masked_fill_(torch.ge(above, bound[:, None], out=flags), 1.0)
    torch.amin(ordered, 1, out=out)
    out.masked_fill_(torch.ge(top_p, 1.0, out=flags[:, 0]), 0.0)


def _penalise(l: Tensor, seen: Tensor, penalty: Tensor, y: Tensor, work: Tensor, flags: Tensor) -> None:
    """y = l · penalty if l < 0, else l / penalty, for tokens in seen; y = l for the others. A finite l stays finite."""
    times, over = work
    largest = torch.finfo(l.dtype).max
    torch.mul(l, penalty[:, None], out=times)
    torch.div(l, penalty[:, None], out=over)
    torch.where(torch.lt(l, 0.0, out=flags), times, over, out=y)
    y.clamp_(-largest, largest)
    torch.eq(seen, 0, out=flags).logical_or_(torch.eq(l, -torch.inf, out=times.view(torch.bool)[:, : l.shape[1]]))
    torch.where(flags, l, y, out=y)


def _noise(seeds: Tensor, sequences: Tensor, drawn: Tensor, part: Scratch) -> Tensor:
    """g (m, V) float32"""
    (c0, c1, c2, c3, low, high), index, keys = part["philox"], part["index"], part["row_integers"]
    c0.copy_(torch.arange(len(index), out=index))
    c1.copy_(drawn[:, None])
    c2.copy_(torch.bitwise_and(sequences, 0xFFFFFFFF, out=keys[0])[:, None])
    torch.bitwise_right_shift(sequences, 32, out=keys[0])
    c3.copy_(keys[0].bitwise_and_(0xFFFFFFFF)[:, None])
    philox((c0, c1, c2, c3), round_keys_of_rows(seeds, keys=keys[:2]), (low, high))
    (v, u, rounded), bits, work = part["noise"], part["noise_bits"], c1.view(torch.float32).view(2, *c1.shape)
    v.copy_(c0).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    torch.sub(1.0, v, out=u)
    v.sub_(torch.sub(1.0, u, out=rounded)).div_(u)  # relative rounding error of u = 1 − v
    log_(u, work, bits)
    log_(v.sub_(u), work, bits)
    noise: Tensor = v.neg_()
    return noise
