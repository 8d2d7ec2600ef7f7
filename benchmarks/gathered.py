"""Dilated attention in its usual formulation: copy the dilated positions out, run SDPA on the copies, copy the results back.

x (B, T, H, D) is viewed as (B, segments, L, r, H, D), with L · r positions in a segment. "head_groups" takes position `offset`
of each r for its group of heads. "longnet" takes the diagonal of (r, heads of a block of r), as the code of LongNet does. Its
branches are mixed by the softmax of their logsumexps. As in that code, no gradient passes through the logsumexps, because SDPA
does not compute it. T must be a multiple of the segment lengths, which must be multiples of the rates, as H must be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilegrad.functional.dilated.pattern import head_groups

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def backends_on(device: torch.device) -> tuple[str, ...]:
    return tuple(BACKENDS) if device.type == "cuda" else ("sdpa",)


def _with_lse(backend: str, *, causal: bool) -> Attend:
    """A function that returns (o, lse) from an SDPA backend; SDPA's public function does not return lse."""
    aten = torch.ops.aten

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if backend == "flash":
            o, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        elif backend == "cudnn":
            o, lse, *_ = aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, compute_log_sumexp=True, is_causal=causal
            )
        else:
            o, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return o, lse.reshape(o.shape[:3])

    return attend


def _by_groups(
    q: Tensor, k: Tensor, v: Tensor, segments: Sequence[int], rates: Sequence[int], backend: str, *, causal: bool
) -> Tensor:
    b, t, h, _ = q.shape
    out = torch.zeros_like(q)
    for g, heads in enumerate(head_groups(h, len(rates))):
        s, r = min(segments[g], t), rates[g]
        some = slice(heads.start, heads.stop)

        def taken(x: Tensor, s: int = s, r: int = r, g: int = g, some: slice = some) -> Tensor:
            """(B, segments, L, heads, D)"""
            segments_of: Tensor = x[:, :, some].unflatten(1, (-1, s))
            return segments_of[:, :, g % r :: r]

        q_g, k_g, v_g = (taken(x).flatten(0, 1).transpose(1, 2).contiguous() for x in (q, k, v))
        with sdpa_kernel(BACKENDS[backend]) if backend in BACKENDS else nullcontext():
            o = F.scaled_dot_product_attention(q_g, k_g, v_g, is_causal=causal)
        taken(out).copy_(o.transpose(1, 2).unflatten(0, (b, -1)))
    return out / len(rates)


def _by_mix(
    q: Tensor, k: Tensor, v: Tensor, segments: Sequence[int], rates: Sequence[int], backend: str, *, causal: bool
) -> Tensor:
    b, t, h, _ = q.shape
    attend = _with_lse(backend, causal=causal)
    parts, lses = [], []
    for segment, r in zip(segments, rates, strict=True):
        s = min(segment, t)

        def taken(x: Tensor, s: int = s, r: int = r) -> Tensor:
            """x as (B, segments, L, H/r, r, D…): head c·r + j takes position j of each r."""
            b, _, h, *rest = x.shape
            seen = x.view(b, -1, s // r, r, h // r, r, *rest)
            return seen.diagonal(dim1=3, dim2=5).movedim(-1, 4)

        copies = [taken(x).flatten(3, 4).flatten(0, 1).transpose(1, 2).contiguous() for x in (q, k, v)]
        o, lse = attend(*copies)
        part, part_lse = torch.zeros_like(q), lse.new_full((b, t, h), -torch.inf)
        taken(part).copy_(o.transpose(1, 2).unflatten(0, (b, -1)).unflatten(3, (-1, r)))
        taken(part_lse).copy_(lse.detach().transpose(1, 2).unflatten(0, (b, -1)).unflatten(3, (-1, r)))
        parts.append(part)
        lses.append(part_lse)
    share = torch.softmax(torch.stack(lses), 0).to(q.dtype)
    y = share[0][..., None] * parts[0]
    for weight, part in zip(share[1:], parts[1:], strict=True):
        y = y + weight[..., None] * part
    return y


def gathered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Sequence[int],
    rates: Sequence[int],
    mode: str,
    backend: str,
    *,
    causal: bool,
) -> Tensor:
    """Dilated attention: q, k, v (B, T, H, D) → y (B, T, H, D)."""
    return (_by_groups if mode == "head_groups" else _by_mix)(q, k, v, segments, rates, backend, causal=causal)
