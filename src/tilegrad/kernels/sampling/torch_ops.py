"""Sampling by torch ops, some rows at a time: any device. On CUDA nothing is read back, so a step can be captured.

The smallest kept key is found bit by bit, from the highest: one pass over the row for each bit. On a CPU a search that no row
needs is left out. Every operation is rounded once or is one of integers, so a row's bits depend on that row alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..philox import WORK_BUFFERS, philox, round_keys_of_rows
from ..scratch import Scratch, Shapes, TensorLike, blocks, rows_of, rows_per_block
from .elementary import CONSTANTS, exp_, log_, mass_bits

BLOCK = {"cpu": 1 << 16, "cuda": 1 << 22}  # elements processed at once


def workspace(logits: TensorLike, *, draw: bool) -> Shapes:
    v, rows, dtype = logits.shape[1], rows_per_block(logits, BLOCK), logits.dtype
    shapes: Shapes = {
        "numbers": ((5 if draw else 3, rows, v), dtype),
        "bits": ((rows, v), CONSTANTS[dtype].integer),
        "masses": ((rows, v), torch.int64),
        "flags": ((3 if draw else 1, rows, v), torch.bool),
        "row_numbers": ((4, rows), torch.float64),
        "row_tops": ((3, rows), dtype),
        "row_integers": ((5, rows), torch.int64),
        "row_flags": ((rows,), torch.bool),
    }
    if draw:
        shapes |= {"philox": ((WORK_BUFFERS, rows, v), torch.int64), "index": ((v,), torch.int64)}
        shapes |= {"row_bits": ((2, rows), CONSTANTS[dtype].integer), "noise": ((3, rows, v), torch.float32)}
        shapes |= {"noise_bits": ((rows, v), torch.int32)}
    return shapes


def logprobs(logits: Tensor, targets: Tensor, *, logprobs: Tensor, scratch: Scratch) -> None:
    for i in blocks(logits.shape[0], rows_per_block(logits, BLOCK)):
        _logprobs(rows_of(logits, i), targets[i], _part(scratch, i), out=logprobs[i])


def fwd(
    logits: Tensor, settings: Tensor, seeds: Tensor, sequences: Tensor, drawn: Tensor, *,
    tokens: Tensor, logprobs: Tensor, seen: Tensor | None, scratch: Scratch,
) -> None:  # fmt: skip
    for i in blocks(logits.shape[0], rows_per_block(logits, BLOCK)):
        part, l = _part(scratch, i), rows_of(logits, i)
        noise = _noise(seeds[i], sequences[i], drawn[i], part)
        _draw(l, settings[i], None if seen is None else seen[i], noise, part, token=tokens[i])
        bad = _logprobs(l, tokens[i], part, out=logprobs[i])
        tokens[i].masked_fill_(bad, -1)
        logprobs[i].masked_fill_(bad, 0.0)
        if seen is not None:  # a row without a token stays as it is
            one, at = part["bits"].view(torch.uint8)[:, :1], torch.clamp(tokens[i], min=0, out=part["row_integers"][0])
            torch.gather(seen[i], 1, at[:, None], out=one)
            one.bitwise_or_(torch.logical_not(bad, out=bad)[:, None])
            seen[i].scatter_(1, at[:, None], one)


def _part(scratch: Scratch, i: slice) -> Scratch:
    """The buffers of i.stop − i.start rows."""
    m, out = i.stop - i.start, {}
    for name, x in scratch.items():
        at = x.ndim - (1 if name.startswith("row_") else 2)
        if name == "index" or x.shape[at] == m:
            out[name] = x
        else:
            shape = (*x.shape[:at], m, *x.shape[at + 1 :])
            out[name] = x.view(-1)[: x.numel() // x.shape[at] * m].view(shape)
    return out


def _logprobs(l: Tensor, targets: Tensor, part: Scratch, *, out: Tensor) -> Tensor:
    """out (m,); returns a mask of the rows whose logits are not all finite or −inf, or are all −inf."""
    x, work, bad = part["numbers"][0], part["numbers"][1:3], part["row_flags"]
    top, at, (a, b, *rest) = part["row_tops"][0], part["row_tops"][1], part["row_numbers"]
    torch.amax(l, 1, out=top)
    _mass(torch.sub(l, top[:, None], out=x), work, part)
    total, index, integers = part["row_integers"][:3]
    torch.sum(part["masses"], 1, out=total)
    a.copy_(total).mul_(2.0 ** -mass_bits(l.shape[1]))
    log_(a, part["row_numbers"][2:], integers)
    torch.clamp(targets, min=0, out=index)
    torch.gather(l, 1, index[:, None], out=at[:, None])
    b.copy_(at).sub_(rest[0].copy_(top)).sub_(a)
    out.copy_(b)
    torch.ne(torch.sub(top, top, out=at), 0.0, out=bad)
    out.masked_fill_(bad, torch.nan)
    torch.lt(targets, 0, out=part["flags"][0, :, 0])
    out.masked_fill_(part["flags"][0, :, 0], 0.0)
    return bad


def _mass(x: Tensor, work: Tensor, part: Scratch) -> None:
    """x ← exp(x), x ≤ 0; masses ← floor(x · 2ˢ + ½)."""
    exp_(x, work, part["bits"], part["flags"][0])
    part["masses"].copy_(torch.mul(x, 2.0 ** mass_bits(x.shape[1]), out=work[0]).add_(0.5))


def _draw(
    l: Tensor, settings: Tensor, seen: Tensor | None, noise: Tensor, part: Scratch, *, token: Tensor
) -> None:  # fmt: skip
    """token (m,) = argmax of z + noise over the kept."""
    y, z, e = part["numbers"][:3]
    work, (flags, _, kept), bits, masses = part["numbers"][3:], part["flags"], part["bits"], part["masses"]
    temperature, top_k, top_p, min_p, penalty = settings.unbind(1)
    top, divisor, setting = part["row_tops"]
    if seen is None:
        y.copy_(l)
    else:
        _penalise(l, seen, setting.copy_(penalty), y, work, flags)
    torch.amax(y, 1, out=top)
    greedy = torch.eq(temperature, 0.0, out=part["row_flags"])
    divisor.copy_(temperature).masked_fill_(greedy, 1.0)
    torch.sub(y, top[:, None], out=z).div_(divisor[:, None])

    bound, v = part["row_numbers"][0], l.shape[1]
    searched, smallest = _needed(top_k > 0, top_p < 1), part["row_bits"]
    kept.fill_(True)
    if searched[0]:
        bits.copy_(_ordered(y, work, bits))
        bound.copy_(top_k).masked_fill_(torch.eq(top_k, 0.0, out=flags[:, 0]), v + 1.0)
        width = 8 * bits.dtype.itemsize
        _smallest(bits, masses.fill_(1), bound, width, part, smallest=smallest[0].fill_(-1 << width - 1))
        torch.ge(bits, smallest[0][:, None], out=kept)
    _mass(e.copy_(z), work, part)
    torch.logical_not(kept, out=flags)
    e.masked_fill_(flags, 0.0)
    masses.masked_fill_(flags, 0)
    z.masked_fill_(flags, -torch.inf)
    if searched[1]:
        total = torch.sum(masses, 1, out=part["row_integers"][0])
        bound.copy_(total).mul_(part["row_numbers"][1].copy_(top_p))
        bound.masked_fill_(torch.ge(top_p, 1.0, out=flags[:, 0]), torch.inf)
        bits.copy_(e.view(bits.dtype))
        _smallest(bits, masses, bound, 8 * bits.dtype.itemsize - 2, part, smallest=smallest[0].fill_(0))
        setting.view(bits.dtype).copy_(smallest[0])
        setting.clamp_(max=1.0)
        z.masked_fill_(torch.lt(e, setting[:, None], out=flags), -torch.inf)
    z.masked_fill_(torch.lt(e, setting.copy_(min_p)[:, None], out=flags), -torch.inf)

    noise.masked_fill_(torch.eq(temperature, 0.0, out=part["row_flags"])[:, None], 0.0)
    torch.argmax(z.add_(noise), 1, out=token)


def _needed(*uses: Tensor) -> tuple[bool, ...]:
    """Which searches to run: on a device all, because reading would synchronize."""
    return tuple(use.device.type != "cpu" or bool(use.any()) for use in uses)


def _penalise(l: Tensor, seen: Tensor, penalty: Tensor, y: Tensor, work: Tensor, flags: Tensor) -> None:
    """y = l · penalty if l < 0, else l / penalty, where seen; l where not. A finite l stays finite."""
    times, over = work
    largest = torch.finfo(l.dtype).max
    torch.mul(l, penalty[:, None], out=times)
    torch.div(l, penalty[:, None], out=over)
    torch.where(torch.lt(l, 0.0, out=flags), times, over, out=y)
    y.clamp_(-largest, largest)
    torch.eq(seen, 0, out=flags).logical_or_(torch.eq(l, -torch.inf, out=times.view(torch.bool)[:, : l.shape[1]]))
    torch.where(flags, l, y, out=y)


def _ordered(y: Tensor, work: Tensor, bits: Tensor) -> Tensor:
    """Integers in the order of the numbers y; −0 and 0 are equal."""
    x = torch.add(y, 0.0, out=work[0]).view(bits.dtype)  # −0 + 0 = 0
    width = 8 * bits.dtype.itemsize
    flipped = torch.bitwise_right_shift(x, width - 1, out=bits).bitwise_and_((1 << width - 1) - 1)
    return x.bitwise_xor_(flipped)


def _smallest(
    keys: Tensor, masses: Tensor, bound: Tensor, width: int, part: Scratch, *, smallest: Tensor
) -> None:  # fmt: skip
    """smallest (m,) ← the smallest t of which the keys above t have a mass below `bound`. Its lower `width` bits are found.
    They are 0 at the beginning, except a sign, which is −."""
    (above, bit, *_), masked = part["row_integers"], part["philox"][0]
    trial, fails, sums = part["row_bits"][1], part["row_flags"], part["row_numbers"][1]
    for n in reversed(range(width)):
        torch.bitwise_or(smallest, (1 << n) - 1, out=trial)
        others = torch.le(keys, trial[:, None], out=part["flags"][1])
        torch.sum(masked.copy_(masses).masked_fill_(others, 0), 1, out=above)
        torch.ge(sums.copy_(above), bound, out=fails)
        one = -1 << n if n == 8 * keys.dtype.itemsize - 1 else 1 << n
        trial.copy_(bit.copy_(fails).mul_(one))
        smallest.bitwise_xor_(trial)


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
    v.sub_(torch.sub(1.0, u, out=rounded)).div_(u)  # what 1 − v lost by rounding
    log_(u, work, bits)
    log_(v.sub_(u), work, bits)
    return v.neg_()
