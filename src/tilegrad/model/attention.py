"""The attention branch of a block, between its norm and the residual stream.

    dense      qkv = x W_qkv' + b         o = attention(rope(q), rope(k), v)      y = o W_proj' + b
    per_head   q, k, v of a head come from its own D channels of x                o and y as in dense
    qk_norm    q, k, v = x W_q' + b, …    q, k = rmsnorm(q), rmsnorm(k) by head, before rope
    value_embeddings   v += s · table[tokens] in some blocks (model/value_embedding.py)

    do = dy W_proj      dq, dk, dv = attention's backward      rope rotates dq, dk back      dx = Σ over q, k, v of their dx
Saved: x (the output of the norm), q and k after rope, v, o, lse; with qk_norm also q and k before their norm, and its rstd.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from ..kernels.attention.context import BUFFERS, Ranks
from ..kernels.attention.mask import Mask
from ..kernels.attention.qkv import (
    qkv_attention_bwd,
    qkv_attention_fwd,
    qkv_attention_workspace,
    qkv_rope,
    qkv_rope_workspace,
)
from ..kernels.cache_attention import (
    cache_attention_fwd,
    cache_attention_workspace,
    cache_write_fwd,
    cache_write_workspace,
)
from ..kernels.norm import norm_workspace, rmsnorm_bwd, rmsnorm_fwd
from ..kernels.residual import zero_fwd
from ..kernels.scratch import Form, Scratch, Shapes, below, larger
from ..memory.types import BufferType
from .config import ModelConfig
from .layer import Buffer, Constant, Declare, Packed, Param
from .linear import LinearLayer
from .lora import Adapter
from .value_embedding import ValueEmbedding

_SCORES = {f"tiled.{name}": BufferType.SCORES for name in ("s", "dp", "tanh")} | {"tiled.masked_out": BufferType.MASK}
_TYPES = _SCORES | below("attention", _SCORES) | dict.fromkeys(BUFFERS, BufferType.COMM)  # types of the scratch


def mask_of(config: ModelConfig, block: int, seed: Buffer | None = None) -> Mask:
    return Mask(causal=True, window=_band(config.window_of(block)), dropout_p=config.dropout, seed=seed)


def _band(window: int | None) -> tuple[int, None] | None:
    """The window (left, right) of a mask, from the window of the config, which counts the token itself."""
    return None if window is None else (window - 1, None)


def packed_mask(mask: Mask, packed: Packed, longest: int) -> Mask:
    """The mask for packed rows, which applies inside each document."""
    ends = packed.cu_seqlens
    return replace(mask, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest)


@dataclass(frozen=True, slots=True)
class Rope:
    """Tables (block_size, D/2) and the number of heads to rotate."""

    cos: Buffer
    sin: Buffer
    positions: Buffer | None  # positions of the tokens, for packed rows or the step of a decoder
    rotated: int
    head_dim: int
    context: Ranks | None
    scratch: Scratch

    @classmethod
    def declare(cls, at: Declare, rotated: int) -> Rope:
        c = at.config
        table = (c.block_size, c.head_dim // 2)
        cos, sin = (at.buffer(f"rope.{name}", table, at.accumulation_dtype, role="inputs") for name in ("cos", "sin"))
        positions = at.positions
        shapes = qkv_rope_workspace(at.b, at.t, rotated, c.head_dim, at.dtype, at.device, packed=positions is not None)
        return cls(cos, sin, positions, rotated, c.head_dim, at.context, at.scratch(f"rope{rotated}", shapes))

    def rotate(self, x: Buffer, *, back: bool) -> None:
        tables, sizes = (self.cos, self.sin), (self.rotated, self.head_dim)
        qkv_rope(*tables, *sizes, self.context, self.positions, qkv=x, scratch=self.scratch, back=back)


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """y = rmsnorm(x) by head, for q or k        x, y, dy, dx (N, H·D), viewed as (N·H, D)   w (D,)   rstd (N·H,)"""

    w: Param
    x: Buffer
    dx: Buffer
    rstd: Buffer
    eps: float
    forward_scratch: Scratch
    backward_scratch: Scratch

    @classmethod
    def declare(cls, at: Declare, name: str, heads: int, type: BufferType) -> HeadNorm:
        d = at.config.head_dim
        form = Form((at.n * heads, d), at.dtype, at.device)
        return cls(
            w=at.param(f"{name}_norm.weight", d, init=Constant(1.0)),
            x=at.rows(f"{name}.x", heads * d, type),
            dx=at.rows(f"{name}.dx", heads * d, type),
            rstd=at.buffer(f"{name}.rstd", (at.n * heads,), at.accumulation_dtype),
            eps=at.config.norm_eps,
            forward_scratch=at.scratch(f"head_norm{heads}", norm_workspace(form, backward=False)),
            backward_scratch=at.scratch(f"head_norm{heads}_bwd", norm_workspace(form, backward=True)),
        )

    def forward(self, *, y: Buffer) -> None:
        x, y, w = self._by_head(self.x), self._by_head(y), self.w.value
        rmsnorm_fwd(x, w, self.eps, y=y, rstd=self.rstd, scratch=self.forward_scratch)

    def backward(self, dy: Buffer) -> None:
        x, dy, dx, w = self._by_head(self.x), self._by_head(dy), self._by_head(self.dx), self.w
        zero_fwd(x=self.dx)
        scratch = self.backward_scratch
        rmsnorm_bwd(dy, x, w.value, self.rstd, dx=dx, dw=w.grad, accumulate=w.accumulate, scratch=scratch)

    def _by_head(self, rows: Buffer) -> Buffer:
        return rows.view(self.rstd.shape[0], self.w.value.shape[0])


@dataclass(frozen=True, slots=True)
class Cache:
    """The cache of keys and values of one block in a decoder.       k, v (B, Hkv, capacity, D)

    slots      (N,) int64, in a prefill: sequence · capacity + position of each row, or −1 for a row that is not written
    positions  (B,) int64, in a step: the number of tokens of each sequence in the cache
    """

    k: Buffer
    v: Buffer
    slots: Buffer | None
    positions: Buffer | None
    n_head: int
    n_kv_head: int
    scratch: Scratch

    @classmethod
    def declare(cls, at: Declare, block: int, mask: Mask) -> Cache | None:
        c, size = at.config, at.cache
        if size is None:
            return None
        shape = (size.sequences, c.kv_heads, size.capacity, c.head_dim)
        k, v = (
            at.buffer(f"blocks.{block}.attn.{part}_cache", shape, type=BufferType.CACHE, role="cache") for part in "kv"
        )
        if not at.decodes:
            slots = at.buffer("inputs.slots", (at.n,), torch.int64, role="inputs")
            shapes = cache_write_workspace(at.n, *shape[:2], c.head_dim, size.capacity, at.dtype, at.device)
            return cls(k, v, slots, None, c.n_head, c.kv_heads, at.scratch("cache_write", shapes))
        shapes = cache_attention_workspace(
            at.b, c.n_head, c.kv_heads, c.head_dim, size.capacity, mask, at.dtype, at.device
        )
        positions = at.buffer("inputs.positions", (at.b,), torch.int64, role="inputs")
        return cls(k, v, None, positions, c.n_head, c.kv_heads, at.scratch("cache_attention", shapes))

    def write(self, qkv: tuple[Buffer, ...]) -> None:
        """Writes the keys and values of the prompts into the cache."""
        if self.slots is not None:
            k, v = qkv[1:] if len(qkv) == 3 else (qkv[0], None)
            cache_write_fwd(
                k, v, self.slots, self.n_head, self.n_kv_head, k_cache=self.k, v_cache=self.v, scratch=self.scratch
            )

    def attend(self, qkv: tuple[Buffer, ...], mask: Mask, *, o: Buffer) -> None:
        """Adds k and v of the new tokens to the cache, and attends to the cache."""
        q, k, v = qkv if len(qkv) == 3 else (qkv[0], None, None)
        assert self.positions is not None
        cache_attention_fwd(
            q,
            k,
            v,
            self.positions,
            mask,
            self.n_head,
            self.n_kv_head,
            o=o,
            k_cache=self.k,
            v_cache=self.v,
            scratch=self.scratch,
        )


def _scratch(
    at: Declare, mask: Mask, bands: Iterable[tuple[int, None] | None], name: str, *, backward: bool
) -> Scratch:
    """Scratch that is large enough for every band that a step may have."""
    c = at.config
    shapes: Shapes = {}
    for band in bands:
        needed = qkv_attention_workspace(
            at.b,
            at.t,
            c.n_head,
            c.kv_heads,
            c.head_dim,
            at.dtype,
            at.device,
            replace(mask, window=band),
            backward=backward,
            deterministic=at.deterministic,
            invariant=at.invariant,
            group=at.context,
        )
        shapes = larger(shapes, needed)
    return at.scratch(name, shapes, _TYPES)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """x, y (N, C)   o (N, Hq·D)   lse (B, Hq, T)
    qkv (N, (Hq + 2·Hkv)·D) for dense without qk_norm, else three buffers (N, H·D)

    Attention and rope view qkv and o as (B, T, …). context: the ranks that share each sequence. With packed rows the mask
    has cu_seqlens, and lse is (Hq, N) in memory.
    """

    projections: tuple[LinearLayer, ...]  # qkv, or q, k, v
    proj: LinearLayer
    qkv: tuple[Buffer, ...]  # in one buffer, or q, k, v
    dqkv: tuple[Buffer, ...]
    o: Buffer
    do: Buffer
    lse: Buffer
    norms: tuple[HeadNorm, ...]  # the norms of q and k, or none
    values: ValueEmbedding | None
    adapter: Adapter | None  # the adapter of the projections
    proj_adapter: Adapter | None
    rope: Rope | None
    mask: Mask
    cache: Cache | None  # the cache of a decoder
    n_head: int
    n_kv_head: int
    deterministic: bool
    invariant: bool
    context: Ranks | None
    forward_scratch: Scratch
    backward_scratch: Scratch

    @classmethod
    def declare(cls, at: Declare, block: int, seed: Buffer | None, *, keeps_x: bool) -> AttentionLayer:
        name = f"blocks.{block}.attn"
        c, b, t, d = at.config, at.b, at.t, at.config.head_dim
        parts = {"q": BufferType.QUERY, "k": BufferType.KEY, "v": BufferType.VALUE}
        widths = {"q": c.n_head * d, "k": c.kv_heads * d, "v": c.kv_heads * d}
        fused = not (per_head := c.projection == "per_head") and not c.qk_norm
        starts = {"q": (0, 0), "k": (0, widths["q"]), "v": (0, widths["q"] + widths["k"]), "qkv": (0, 0)}
        outputs = starts if fused else {"q": (0, 0), "k": (1, 0), "v": (2, 0)}
        fused_widths = tuple(widths.values()) if fused else ()
        if fused:
            parts, widths = {"qkv": BufferType.TEMP}, {"qkv": sum(fused_widths)}
        mask = mask_of(c, block, seed if c.dropout else None)
        if at.packed:
            mask = packed_mask(mask, at.packed, t)
        windows = (c.window, *at.windows) if c.window_layers is None or block in c.window_layers else (None,)
        bands = dict.fromkeys(map(_band, windows))
        windowed = "_window" if c.window_layers is not None and any(bands) else ""

        first: LinearLayer | None = None
        projections: tuple[LinearLayer, ...] = ()
        for part, width in widths.items():
            sizes = f"{name}.{part}", c.n_embd, width
            projection = LinearLayer.declare(
                at, *sizes, bias=c.qkv_bias, per_head=per_head, parts=fused_widths, shared=first, keeps_x=keeps_x
            )
            first, projections = first or projection, (*projections, projection)
        proj = LinearLayer.declare(at, f"{name}.proj", c.n_head * d, c.n_embd, at.onto_stream, bias=c.proj_bias)
        return cls(
            projections=projections,
            proj=proj,
            qkv=tuple(at.rows(f"{name}.{part}.y", widths[part], type) for part, type in parts.items()),
            dqkv=tuple(at.rows(f"{name}.{part}.dy", widths[part], type) for part, type in parts.items()),
            o=at.rows(f"{name}.o", c.n_head * d, BufferType.OUTPUT),
            do=at.rows(f"{name}.do", c.n_head * d, BufferType.OUTPUT),
            lse=at.buffer(f"{name}.lse", (b, c.n_head, t), at.accumulation_dtype),
            norms=tuple(
                HeadNorm.declare(at, f"{name}.{part}", heads, parts[part])
                for part, heads in (("q", c.n_head), ("k", c.kv_heads))
                if c.qk_norm
            ),
            values=ValueEmbedding.declare(at, block),
            adapter=Adapter.declare(at, block, "attn.in", projections, outputs, seed),
            proj_adapter=Adapter.declare(at, block, "attn.proj", (proj,), {"proj": (0, 0)}, seed),
            rope=Rope.declare(at, c.n_head + c.kv_heads if fused else c.n_head) if c.position == "rope" else None,
            mask=mask,
            cache=Cache.declare(at, block, mask),
            n_head=c.n_head,
            n_kv_head=c.kv_heads,
            deterministic=at.deterministic,
            invariant=at.invariant,
            context=at.context,
            forward_scratch=_scratch(at, mask, bands, f"attention{windowed}", backward=False),
            backward_scratch=_scratch(at, mask, bands, f"attention{windowed}_bwd", backward=True),
        )

    def forward(self, x: Buffer, *, y: Buffer) -> None:
        self.project(x)
        self.rotate(self.qkv)
        self.attend()
        if self.proj_adapter is not None:
            self.proj_adapter.forward(self.o)
        self.proj.forward(self.o, y=y, adapter=self.proj_adapter)

    def backward(self, dy: Buffer, *, dx: Buffer, bias_grad: bool) -> None:
        """Computes dx and all gradients of parameters but those of `backward_weight`; the bias gradient of proj only if
        `bias_grad`."""
        if self.proj_adapter is not None:
            self.proj_adapter.backward(dy)
        self.proj.backward_input(dy, dx=self.do, adapter=self.proj_adapter)
        self.proj.backward_weight(dy, self.o, bias_grad=bias_grad)
        if self.proj_adapter is not None:
            self.proj_adapter.backward_weight(self.o)
        self.attend_backward()
        self.rotate(self.dqkv, back=True)
        if self.values is not None:
            self.values.backward(self.dqkv[-1])
        for norm, dy in zip(self.norms, self.dqkv, strict=False):
            norm.backward(dy)
        if self.adapter is not None:
            self.adapter.backward(*self.dprojected)
        for i, (projection, dy) in enumerate(zip(self.projections, self.dprojected, strict=True)):
            projection.backward_input(dy, dx=dx, accumulate=i > 0, adapter=None if i else self.adapter)

    def backward_weight(self, x: Buffer) -> None:
        """The gradients of the parameters that multiply x: the projections to q, k and v, with their biases, and A of their
        adapter. Called after `backward`."""
        for projection, dy in zip(self.projections, self.dprojected, strict=True):
            projection.backward_weight(dy, x)
        if self.adapter is not None:
            self.adapter.backward_weight(x)

    @property
    def reads_x(self) -> bool:
        """Whether `backward_weight` reads x."""
        adapted = self.adapter is not None and self.adapter.a.grad is not None
        return adapted or any(projection.reads_x for projection in self.projections)

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture this layer. It can't if the kernel `tiled` runs on packed rows, because that kernel
        reads the ends of documents on the host."""
        return self.mask.cu_seqlens_q is None or not any("tiled." in name for name in self.forward_scratch)

    @property
    def dprojected(self) -> tuple[Buffer, ...]:
        """The gradients of the outputs of the projections."""
        return (*(norm.dx for norm in self.norms), *self.dqkv[len(self.norms) :])

    def project(self, x: Buffer) -> None:
        """q, k, v = x W' + b; with qk_norm q, k = rmsnorm(q), rmsnorm(k) by head; with `values` v += s · table[tokens]"""
        if self.adapter is not None:
            self.adapter.forward(x)
        outputs = (*(n.x for n in self.norms), *self.qkv[len(self.norms) :])
        for i, (projection, y) in enumerate(zip(self.projections, outputs, strict=True)):
            projection.forward(x, y=y, adapter=self.adapter, output=i)
        for norm, y in zip(self.norms, self.qkv, strict=False):
            norm.forward(y=y)
        if self.values is not None:
            self.values.forward(rows=self.qkv[-1])

    def rotate(self, qkv: tuple[Buffer, ...], *, back: bool = False) -> None:
        """q = rope(q)   k = rope(k), or dq and dk rotated back"""
        if self.rope:
            for x in qkv[:2]:
                self.rope.rotate(self._by_sequence(x), back=back)

    def attend(self) -> None:
        """o, lse = attention(q, k, v)"""
        if self.cache is not None and self.cache.positions is not None:
            self.cache.attend(self.qkv, self.mask, o=self.o)
            return
        if self.cache is not None:
            self.cache.write(self.qkv)
        o, scratch, invariant = self._by_sequence(self.o), self.forward_scratch, self.invariant
        heads = (self.n_head, self.n_kv_head, self.context)
        qkv = [*map(self._by_sequence, self.qkv)]
        qkv_attention_fwd(qkv, self.mask, *heads, o=o, lse=self.lse, scratch=scratch, invariant=invariant)

    def attend_backward(self) -> None:
        o, do = self._by_sequence(self.o), self._by_sequence(self.do)
        heads = (self.n_head, self.n_kv_head, self.context)
        lse, mask, scratch, ordered = self.lse, self.mask, self.backward_scratch, self.deterministic
        qkv, dqkv = ([*map(self._by_sequence, x)] for x in (self.qkv, self.dqkv))
        qkv_attention_bwd(qkv, o, lse, do, mask, *heads, dqkv=dqkv, deterministic=ordered, scratch=scratch)

    def _by_sequence(self, rows: Buffer) -> Buffer:
        """A view of (N, columns) as (B, T, columns)."""
        b, _, t = self.lse.shape
        return rows.view(b, t, rows.shape[-1])
