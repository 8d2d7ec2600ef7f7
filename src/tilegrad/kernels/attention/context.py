"""Attention over T rows split among N ranks (context parallel): each rank has T / N rows of q, k and v and gathers all k and v.

    runs       2N runs of c = T / 2N rows; rank r has runs r and 2N − 1 − r, in this order ("zigzag": equal causal work)
    forward    K, V = all-gather of k, v          for each run a: o[a], lse[a] = attention(q[a], K[: (a+1)·c], V[: (a+1)·c])
    backward   K, V = all-gather of k, v          for each run a: dq[a], dK_a, dV_a
               dk, dv = reduce-scatter of Σ dK_a, Σ dV_a, summed in the accumulation dtype

Rows and columns are aligned at the bottom right (mask.py), so a run needs no offset: the K and V of a run end where the run
ends. Tiles of columns start at column 0, as in one call on all T rows, so without a window o and dq have the bits of that call.

    q (B, Hq, t, D)   k (B, Hkv, t, D)   v (B, Hkv, t, Dv)   o, do (B, Hq, t, Dv)   lse, dlse (B, Hq, t)      t = T / N = 2·c

dsinks is this rank's part, to be summed over the ranks like every gradient of a parameter. Each pass sends a rank's k and v
N − 1 times. The backward also sends their gradients N − 1 times, in the accumulation dtype. K and V are needed only during an
op.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

from torch import Tensor

from ..op import op
from ..scratch import Form, Scratch, Shapes, accumulation_dtype, below, larger, of, views
from .api import attention_bwd, attention_fwd, attention_workspace
from .checks import require
from .mask import Mask
from .problem import FEW_ROWS

BUFFERS = ("parts", "k", "v", "dparts", "dk", "dv", "run_dk", "run_dv")  # sent, received or summed


class Ranks(Protocol):
    """The ranks that share a sequence, for example a group of engine/dist/mesh.py."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    def all_gather(self, part: Tensor, *, out: Tensor) -> Any:
        """out = the parts of all ranks, in rank order. `part` may be this rank's slice of `out`."""

    def reduce_scatter(self, x: Tensor, *, out: Tensor) -> Any:
        """x has `world` equal parts; out = Σ over ranks of this rank's part. `out` may be a slice of x."""


@dataclass(frozen=True, slots=True)
class RanksToBe:
    """A placeholder for `Ranks`: a program can be declared and traced with it, but not run."""

    world: int
    rank: int = 0


def runs_of(rank: int, world: int) -> tuple[int, int]:
    """The runs that a rank holds."""
    return rank, 2 * world - 1 - rank


def positions_of(rank: int, world: int, t: int) -> tuple[slice, slice]:
    """The positions of the first and the second half of a rank's t rows in the whole sequence."""
    first, last = (slice(a * (t // 2), (a + 1) * (t // 2)) for a in runs_of(rank, world))
    return first, last


def check_mask(mask: Mask) -> None:
    """Refuses masks that a sequence split among ranks does not support."""
    require(mask.causal, "causal", mask.causal, "True if ranks share a sequence")
    require(mask.bias is None, "bias", "a tensor", "None if ranks share a sequence", show=str)
    require(mask.intervals is None, "intervals", "a tensor", "None if ranks share a sequence", show=str)
    require(not mask.dropout_p, "dropout_p", mask.dropout_p, "0.0 if ranks share a sequence")
    require(not mask.varlen, "cu_seqlens_q", "a tensor", "None if ranks share a sequence", show=str)


def _buffers(q: Any, k: Any, v: Any, world: int, *, backward: bool) -> Shapes:
    (b, h, t, d), dv, acc = k.shape, v.shape[-1], accumulation_dtype(q.dtype)
    require(t % 2 == 0, "q", t, "an even number of rows per rank (two runs of equal length)")
    parts, sequence, first_run = (world, b * h * t * (d + dv)), (b, h, world * t), (b, h, world * t // 2)
    shapes: Shapes = {"parts": (parts, q.dtype), "k": ((*sequence, d), q.dtype), "v": ((*sequence, dv), q.dtype)}
    if backward:
        shapes |= {"dparts": (parts, acc), "dk": ((*sequence, d), acc), "dv": ((*sequence, dv), acc)}
        shapes |= {"run_dk": ((*first_run, d), acc), "run_dv": ((*first_run, dv), acc)}  # for up to T / 2 columns
    return shapes


def gather_attention_workspace(
    q: Any, k: Any, v: Any, mask: Mask, world: int, *, backward: bool, deterministic: bool = False
) -> Shapes:
    """Name → (shape, dtype) of each buffer in `scratch`, enough for every rank and for up to t rows per rank."""
    check_mask(mask)
    shapes = _buffers(q, k, v, world, backward=backward)
    acc = accumulation_dtype(q.dtype)
    for c in {min(q.shape[2] // 2, FEW_ROWS), q.shape[2] // 2}:
        rows = Form((*q.shape[:2], c, q.shape[3]), q.dtype, q.device)
        for end in range(c, 2 * world * c + 1, max(c, 1)):
            k_run, v_run = (Form((*x.shape[:2], end, x.shape[3]), x.dtype, x.device) for x in (k, v))
            dk, dv = (Form(x.shape, acc, x.device) if backward else None for x in (k_run, v_run))
            needed = attention_workspace(
                rows, k_run, v_run, mask, backward=backward, deterministic=backward and deterministic, dk=dk, dv=dv
            )
            shapes = larger(shapes, below("attention", needed))
    return shapes


def _pair(part: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Views of `part`, the rows of one rank: of k and of v."""
    n = prod(k.shape)
    return part[:n].view(k.shape), part[n:].view(v.shape)


def _by_run(part: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """`_pair` for each of the rank's two runs."""
    c, (pk, pv) = k.shape[2] // 2, _pair(part, k, v)
    yield pk[:, :, :c], pv[:, :, :c]
    yield pk[:, :, c:], pv[:, :, c:]


def _gather(k: Tensor, v: Tensor, group: Ranks, buffers: Scratch) -> None:
    """buffers["k"], buffers["v"] = the rows of all ranks, in the order of the sequence."""
    parts, c = buffers["parts"], k.shape[2] // 2
    for place, x in zip(_pair(parts[group.rank], k, v), (k, v), strict=True):
        place.copy_(x)
    group.all_gather(parts[group.rank], out=parts.view(-1))
    for rank, part in enumerate(parts):
        for a, (pk, pv) in zip(runs_of(rank, group.world), _by_run(part, k, v), strict=True):
            buffers["k"][:, :, a * c : (a + 1) * c].copy_(pk)
            buffers["v"][:, :, a * c : (a + 1) * c].copy_(pv)


def _scatter(dk: Tensor, dv: Tensor, group: Ranks, buffers: Scratch) -> None:
    """dk, dv = the gradients of this rank's rows, summed over ranks and runs. A run attends to no column after it."""
    dparts, c = buffers["dparts"], dk.shape[2] // 2
    first, last = runs_of(group.rank, group.world)
    sources = ((buffers["dk"], buffers["run_dk"]), (buffers["dv"], buffers["run_dv"]))
    for rank, part in enumerate(dparts):
        for a, outputs in zip(runs_of(rank, group.world), _by_run(part, dk, dv), strict=True):
            columns = slice(a * c, (a + 1) * c)
            for out, (last_run_grad, first_run_grad) in zip(outputs, sources, strict=True):
                if a > last:
                    out.zero_()
                    continue
                out.copy_(last_run_grad[:, :, columns])
                if a <= first:
                    out.add_(first_run_grad[:, :, columns])
    group.reduce_scatter(dparts.view(-1), out=dparts[group.rank])
    for x, total in zip((dk, dv), _pair(dparts[group.rank], dk, dv), strict=True):
        x.copy_(total)


@op()
def gather_attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, group: Ranks, *, o: Tensor | None, lse: Tensor | None, scratch: Scratch
) -> None:
    """Computes o and lse of this rank's rows."""
    check_mask(mask)
    buffers = views(scratch, _buffers(q, k, v, group.world, backward=False), q.device, "gather_attention")
    _gather(k, v, group, buffers)
    for i, end in _runs(q, group):
        o_run, lse_run = (None if x is None else x[:, :, i] for x in (o, lse))
        attention_fwd(
            q[:, :, i],
            buffers["k"][:, :, :end],
            buffers["v"][:, :, :end],
            mask,
            o=o_run,
            lse=lse_run,
            scratch=of("attention", scratch),
        )


@op(accumulates=("dsinks",))
def gather_attention_bwd(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, mask: Mask, group: Ranks, *,
    dq: Tensor, dk: Tensor, dv: Tensor, dsinks: Tensor | None = None, scratch: Scratch, deterministic: bool = False,
) -> None:  # fmt: skip
    """Computes dq, dk and dv of this rank's rows. dk and dv are sums over all ranks. dsinks is this rank's part."""
    check_mask(mask)
    buffers = views(scratch, _buffers(q, k, v, group.world, backward=True), q.device, "gather_attention")
    _gather(k, v, group, buffers)
    for (i, end), prefix in zip(_runs(q, group), ("run_", ""), strict=True):
        q_run, o_run, lse_run, do_run, dq_run = (x[:, :, i] for x in (q, o, lse, do, dq))
        attention_bwd(
            q_run,
            buffers["k"][:, :, :end],
            buffers["v"][:, :, :end],
            o_run,
            lse_run,
            do_run,
            None if dlse is None else dlse[:, :, i],
            mask,
            dq=dq_run,
            dk=buffers[f"{prefix}dk"][:, :, :end],
            dv=buffers[f"{prefix}dv"][:, :, :end],
            dsinks=dsinks,
            scratch=of("attention", scratch),
            deterministic=deterministic,
        )
    _scatter(dk, dv, group, buffers)


def _runs(q: Tensor, group: Ranks) -> Iterator[tuple[slice, int]]:
    """(rows, end) of each run of this rank: its slice of q, and the end of the columns that it attends to."""
    c = q.shape[2] // 2
    first, last = positions_of(group.rank, group.world, 2 * c)
    yield slice(0, c), first.stop
    yield slice(c, 2 * c), last.stop
