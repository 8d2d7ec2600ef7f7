"""The attention branch of a block, between its norm and the residual stream.

    dense      qkv = x W_qkv' + b         o = attention(rope(q), rope(k), v)      y = o W_proj' + b
    per_head   q, k, v = x by head, each head from its own D channels             the rest alike

    do = dy W_proj      dq, dk, dv = attention's backward      rope rotates dq, dk back      dx = Σ over q, k, v of their dx
Saved: x (the norm's output), q k v after rope, o, lse.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.attention.mask import Mask
from ..kernels.attention.qkv import (
    q_k_v_attention_bwd,
    q_k_v_attention_fwd,
    qkv_attention_bwd,
    qkv_attention_fwd,
    qkv_attention_workspace,
    qkv_rope_bwd,
    qkv_rope_fwd,
    qkv_rope_workspace,
)
from ..kernels.residual import add_fwd
from ..kernels.scratch import Scratch
from ..memory.types import BufferType
from .config import ModelConfig
from .layer import Buffer, Declare
from .linear import LinearLayer

_SCORES = {f"tiled.{name}": BufferType.SCORES for name in ("s", "dp", "tanh")} | {"tiled.masked_out": BufferType.MASK}


def mask_of(config: ModelConfig, seed: Buffer | None = None) -> Mask:
    window = None if config.window is None else (config.window - 1, None)
    return Mask(causal=True, window=window, dropout_p=config.dropout, seed=seed)


@dataclass(frozen=True, slots=True)
class Rope:
    """Tables (block_size, D/2) and the heads to rotate."""

    cos: Buffer
    sin: Buffer
    rotated: int
    head_dim: int
    scratch: Scratch

    @classmethod
    def declare(cls, at: Declare, rotated: int) -> Rope:
        c = at.config
        table = (c.block_size, c.head_dim // 2)
        cos, sin = (at.buffer(f"rope.{name}", table, at.accumulation_dtype, role="inputs") for name in ("cos", "sin"))
        shapes = qkv_rope_workspace(at.b, at.t, rotated, c.head_dim, at.dtype, at.device)
        return cls(cos, sin, rotated, c.head_dim, at.scratch(f"rope{rotated}", shapes))

    def forward(self, x: Buffer) -> None:
        qkv_rope_fwd(self.cos, self.sin, self.rotated, self.head_dim, qkv=x, scratch=self.scratch)

    def backward(self, dx: Buffer) -> None:
        qkv_rope_bwd(self.cos, self.sin, self.rotated, self.head_dim, dqkv=dx, scratch=self.scratch)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """x, y, o (N, C)   qkv (N, (Hq + 2·Hkv)·D) for dense, three of (N, H·D) for per_head   lse (B, Hq, T)

    Attention and rope view qkv and o as (B, T, …).
    """

    projections: tuple[LinearLayer, ...]  # qkv, or q, k, v
    proj: LinearLayer
    qkv: tuple[Buffer, ...]  # in one buffer, or q, k, v
    dqkv: tuple[Buffer, ...]
    o: Buffer
    do: Buffer
    lse: Buffer
    dx_parts: tuple[Buffer, ...]  # where k's and v's dx are formed, to be added to q's
    rope: Rope | None
    mask: Mask
    n_head: int
    n_kv_head: int
    forward_scratch: Scratch
    backward_scratch: Scratch

    @classmethod
    def declare(cls, at: Declare, name: str, seed: Buffer | None) -> AttentionLayer:
        c, b, t = at.config, at.b, at.t
        dense = c.projection == "dense"
        width = (c.n_head + 2 * c.kv_heads) * c.head_dim if dense else c.n_embd
        parts = {"q": BufferType.QUERY, "k": BufferType.KEY, "v": BufferType.VALUE}
        if dense:
            parts = {"qkv": BufferType.TEMP}  # of no one type
        mask = mask_of(c, seed)

        def scratch(*, backward: bool) -> Scratch:
            form = (c.n_head, c.kv_heads, c.head_dim, at.dtype, at.device)
            shapes = qkv_attention_workspace(b, t, *form, mask, backward=backward)
            return at.scratch(f"attention{'_bwd' if backward else ''}", shapes, _SCORES)

        return cls(
            projections=tuple(
                LinearLayer.declare(at, f"{name}.{part}", c.n_embd, width)
                if dense
                else LinearLayer.declare_per_head(at, f"{name}.{part}")
                for part in parts
            ),
            proj=LinearLayer.declare(at, f"{name}.proj", c.n_embd, c.n_embd, at.onto_stream),
            qkv=tuple(at.rows(f"{name}.{part}.y", width, type) for part, type in parts.items()),
            dqkv=tuple(at.rows(f"{name}.{part}.dy", width, type) for part, type in parts.items()),
            o=at.rows(f"{name}.o", c.n_embd, BufferType.OUTPUT),
            do=at.rows(f"{name}.do", c.n_embd, BufferType.OUTPUT),
            lse=at.buffer(f"{name}.lse", (b, c.n_head, t), at.accumulation_dtype),
            dx_parts=() if dense else (at.rows("scratch.dx_part", c.n_embd),) * 2,
            rope=Rope.declare(at, c.n_head + c.kv_heads if dense else c.n_head) if c.position == "rope" else None,
            mask=mask,
            n_head=c.n_head,
            n_kv_head=c.kv_heads,
            forward_scratch=scratch(backward=False),
            backward_scratch=scratch(backward=True),
        )

    def forward(self, x: Buffer, *, y: Buffer) -> None:
        self.project(x)
        self.rotate()
        self.attend()
        self.proj.forward(self.o, y=y)

    def backward(self, dy: Buffer, x: Buffer, *, dx: Buffer) -> None:
        self.proj.backward(dy, self.o, dx=self.do)
        self.attend_backward()
        self.rotate_backward()
        self.project_backward(x, dx=dx)

    def project(self, x: Buffer) -> None:
        """q, k, v = x W' + b"""
        for projection, y in zip(self.projections, self.qkv, strict=True):
            projection.forward(x, y=y)

    def project_backward(self, x: Buffer, *, dx: Buffer) -> None:
        self.projections[0].backward(self.dqkv[0], x, dx=dx)
        for projection, dy, dx_part in zip(self.projections[1:], self.dqkv[1:], self.dx_parts, strict=True):
            projection.backward(dy, x, dx=dx_part)
            add_fwd(dx, dx_part, y=dx)

    def rotate(self) -> None:
        """q = rope(q)   k = rope(k)"""
        if self.rope:
            for x in self.qkv[:2]:
                self.rope.forward(self._by_sequence(x))

    def rotate_backward(self) -> None:
        if self.rope:
            for dx in self.dqkv[:2]:
                self.rope.backward(self._by_sequence(dx))

    def attend(self) -> None:
        """o, lse = attention(q, k, v)"""
        o, heads, scratch = self._by_sequence(self.o), (self.n_head, self.n_kv_head), self.forward_scratch
        if len(self.qkv) == 1:
            qkv = self._by_sequence(self.qkv[0])
            qkv_attention_fwd(qkv, self.mask, *heads, o=o, lse=self.lse, scratch=scratch)
        else:
            q, k, v = map(self._by_sequence, self.qkv)
            q_k_v_attention_fwd(q, k, v, self.mask, *heads, o=o, lse=self.lse, scratch=scratch)

    def attend_backward(self) -> None:
        o, do, heads = self._by_sequence(self.o), self._by_sequence(self.do), (self.n_head, self.n_kv_head)
        scratch = self.backward_scratch
        if len(self.qkv) == 1:
            qkv, dqkv = self._by_sequence(self.qkv[0]), self._by_sequence(self.dqkv[0])
            qkv_attention_bwd(qkv, o, self.lse, do, self.mask, *heads, dqkv=dqkv, scratch=scratch)
        else:
            (q, k, v), (dq, dk, dv) = map(self._by_sequence, self.qkv), map(self._by_sequence, self.dqkv)
            q_k_v_attention_bwd(q, k, v, o, self.lse, do, self.mask, *heads, dq=dq, dk=dk, dv=dv, scratch=scratch)

    def _by_sequence(self, rows: Buffer) -> Buffer:
        """(N, columns) seen as (B, T, columns)."""
        b, _, t = self.lse.shape
        return rows.view(b, t, rows.shape[-1])
