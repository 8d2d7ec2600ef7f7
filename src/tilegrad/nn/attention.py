"""A module for the common uses of torch.nn.MultiheadAttention, with tilegrad's kernels, GQA, a window, rope and a cache.

    q, k, v = x W_inᵀ + b, split into heads       o = attention(rope(q), rope(k), v)       y = o W_outᵀ + b

Parameters have the names and shapes of MultiheadAttention, so its state_dict loads. Attention probabilities are never stored:
need_weights=True raises. As in MultiheadAttention, True in a bool mask masks a key out.

The module can replace self_attn of torch.nn.TransformerEncoderLayer, and self_attn and multihead_attn of
TransformerDecoderLayer. torch's fused inference path, which would read the weights without calling this module, is off. So
tilegrad's kernels run in eval() too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..functional import attention
from ..functional.dispatch import managed_attention
from ..kernels.attention.checks import TENSOR, require
from ..kernels.attention.mask import Mask
from ..kernels.rope.frequencies import rope_frequencies
from ..memory.managed.manager import AttentionBufferManager


@dataclass(slots=True)
class Cache:
    """Keys and values of the tokens so far, for decoding: (B, Hkv, max_tokens, D). The first `length` tokens are filled."""

    k: Tensor
    v: Tensor
    length: int = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v (B, Hkv, T, D), and return all keys and values so far."""
        stop = self.length + k.shape[2]
        if stop > self.k.shape[2]:
            raise ValueError(f"cache: got {stop} tokens; accepted: at most max_tokens = {self.k.shape[2]}")
        self.k[:, :, self.length : stop], self.v[:, :, self.length : stop] = k, v
        self.length = stop
        return self.k[:, :, :stop], self.v[:, :, :stop]


class Attention(nn.Module):
    """Multi-head attention over (B, T, C), or (T, B, C) with batch_first=False, the default as in MultiheadAttention.

    num_kv_heads   number of heads of keys and values; None: num_heads
    window         number of keys to the left to which a token attends, itself included; None: all
    rope_theta     base of the rotary position embedding, which pairs element i of a head with element i + D/2; None: no rope
    manager        an AttentionBufferManager for the scratch of the kernel, which modules may share; None: torch's allocator.
                   A copy of the module has no manager

    >>> import torch, tilegrad.nn
    >>> theirs = torch.nn.MultiheadAttention(64, 4, batch_first=True)
    >>> ours = tilegrad.nn.Attention(64, 4, batch_first=True)
    >>> _ = ours.load_state_dict(theirs.state_dict())
    >>> x = torch.randn(2, 10, 64)
    >>> torch.allclose(ours(x, x, x)[0], theirs(x, x, x)[0], atol=1e-6)
    True
    """

    _qkv_same_embed_dim = False  # so that torch's fused layer calls this module instead of reading its weights

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        batch_first: bool = False,
        num_kv_heads: int | None = None,
        window: int | None = None,
        rope_theta: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        manager: AttentionBufferManager | None = None,
    ) -> None:
        super().__init__()
        self.manager = manager
        kv = num_heads if num_kv_heads is None else num_kv_heads
        if min(embed_dim, num_heads, kv) < 1 or embed_dim % num_heads or num_heads % kv:
            got = f"embed_dim {embed_dim}, num_heads {num_heads}, num_kv_heads {kv}"
            raise ValueError(
                f"num_heads: got {got}; accepted: ints ≥ 1, num_heads a divisor of embed_dim and a multiple of num_kv_heads"
            )
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, kv
        self.head_dim, self.dropout, self.batch_first = embed_dim // num_heads, dropout, batch_first
        self.window, self.rope_theta = window, rope_theta
        rows = (num_heads + 2 * kv) * self.head_dim
        factory_kwargs = {"device": device, "dtype": dtype}
        self.in_proj_weight = nn.Parameter(torch.empty(rows, embed_dim, **factory_kwargs))  # type: ignore[arg-type]
        self.in_proj_bias = nn.Parameter(torch.zeros(rows, **factory_kwargs)) if bias else None  # type: ignore[arg-type]
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory_kwargs)
        nn.init.xavier_uniform_(self.in_proj_weight)
        if bias:
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        *,
        is_causal: bool = False,
        intervals: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, None]:
        """(y, None). key=None: self-attention. Masks are as in MultiheadAttention: key_padding_mask (B, S), attn_mask (L, S) or
        (B·H, L, S). A bool mask has True where a pair is masked out; any other mask is added to the scores. is_causal needs no
        attn_mask. `intervals` are as in `tilegrad.attention`; `tilegrad.masks` makes them. With intervals, is_causal is the
        option `causal` of `tilegrad.attention`, and attn_mask masks out further pairs. With a cache, attention is causal, and
        keys and values of earlier calls come first. A nested query (B, jagged, C) is self-attention too."""
        if isinstance(query, Tensor) and query.is_nested:
            others = (key, value, key_padding_mask, attn_mask, intervals, cache)
            return self._nested(query, others, is_causal=is_causal, need_weights=need_weights), None
        q, k, v = self._project(*self._inputs(query, key, value, need_weights=need_weights))
        start = 0 if cache is None else cache.length
        if self.rope_theta is not None:
            q, k = self._rotate(q, start), self._rotate(k, start)
        causal = is_causal or cache is not None
        if cache is not None:
            k, v = cache.append(k, v)
        elif causal and q.shape[2] != k.shape[2]:
            raise ValueError(
                f"is_causal: got {q.shape[2]} rows, {k.shape[2]} keys; accepted: as many rows as keys, or a cache"
            )
        window = None if self.window is None else (self.window - 1, None)
        hint = is_causal and intervals is None  # attn_mask is then the causal mask, which is not read
        bias = self._bias(key_padding_mask, None if hint else attn_mask, q, k)
        dropout_p = self.dropout if self.training else 0.0
        if self.manager is None or torch.compiler.is_compiling():  # a compiled graph plans its own memory
            o = attention(q, k, v, causal=causal, window=window, bias=bias, intervals=intervals, dropout_p=dropout_p)
        else:
            mask = Mask(causal, window, bias=bias, dropout_p=dropout_p, intervals=intervals)
            o = managed_attention(q, k, v, mask, self.manager)
        return self._output(o.transpose(1, 2).flatten(2), query), None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "manager": None}

    def new_cache(self, batch_size: int, max_tokens: int) -> Cache:
        shape = (batch_size, self.num_kv_heads, max_tokens, self.head_dim)
        return Cache(self.in_proj_weight.new_empty(shape), self.in_proj_weight.new_empty(shape))

    def _inputs(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, *, need_weights: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value as (B, T, C)."""
        if need_weights:
            raise ValueError("need_weights: got True; accepted: False, because attention weights are never stored")
        key = query if key is None else key
        value = key if value is None else value
        for name, x in (("query", query), ("key", key), ("value", value)):
            require(isinstance(x, Tensor), name, type(x).__name__, TENSOR, TypeError, show=str)
            require(not x.is_nested, name, "a nested tensor", "a padded tensor", show=str)
            if not (x.ndim == query.ndim in (2, 3) and x.shape[-1] == self.embed_dim):
                of_query = "" if name == "query" else f", but query is {tuple(query.shape)}"
                batched = "(B, T, C)" if self.batch_first else "(T, B, C) (batch_first=True for (B, T, C))"
                accepted = f"{batched}, or (T, C) for all three, with C = embed_dim = {self.embed_dim}"
                raise ValueError(f"{name}: got shape {tuple(x.shape)}{of_query}; accepted: {accepted}")
        if query.ndim == 2:
            return query[None], key[None], value[None]
        if not self.batch_first:
            return query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        return query, key, value

    def _nested(self, query: Tensor, others: tuple[object, ...], *, is_causal: bool, need_weights: bool) -> Tensor:
        """Sequences of different lengths, as torch.nn.TransformerEncoder passes them if it skips padding."""
        key, value, *absent = others
        is_self_attention = all(x is None or x is query for x in (key, value)) and all(x is None for x in absent)
        strided = query.layout == torch.strided and self.batch_first
        accepted = "one strided tensor as query, key and value, with batch_first=True, no masks and no cache"
        require(is_self_attention and strided, "query", "a nested tensor", accepted, show=str)
        lengths = [len(x) for x in query.unbind()]
        padding = torch.arange(max(lengths), device=query.device) >= torch.tensor(lengths, device=query.device)[:, None]
        y, _ = self.forward(
            torch.nested.to_padded_tensor(query, 0.0),
            key_padding_mask=padding,
            need_weights=need_weights,
            is_causal=is_causal,
        )
        return torch.nested.as_nested_tensor([row[:n] for row, n in zip(y, lengths, strict=True)])

    def _output(self, o: Tensor, query: Tensor) -> Tensor:
        """The output projection of o (B, T, C), in the layout of the query."""
        y: Tensor = self.out_proj(o)
        if query.ndim == 2:
            return y[0]
        return y if self.batch_first else y.transpose(0, 1)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, L, D), k and v (B, Hkv, S, D)."""
        sizes = [heads * self.head_dim for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        if query is key is value:
            projected = linear(query, self.in_proj_weight, self.in_proj_bias).split(sizes, -1)
        else:
            weights = self.in_proj_weight.split(sizes)
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.split(sizes)
            projected = tuple(linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in projected)
        return q, k, v

    def _rotate(self, x: Tensor, start: int) -> Tensor:
        """Rope of x (B, H, T, D), whose positions begin at `start`."""
        frequencies, _ = rope_frequencies(float(self.rope_theta or 1.0), self.head_dim, None)
        positions = torch.arange(start, start + x.shape[2], dtype=torch.float64, device=x.device)
        angle = torch.outer(positions, torch.tensor(frequencies, dtype=torch.float64, device=x.device))
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        real, imaginary = x.chunk(2, -1)
        return torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin], -1)

    def _bias(self, padding: Tensor | None, mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """The masks of MultiheadAttention as a bias of `attention`, where True attends."""
        batch, rows, columns = q.shape[0], q.shape[2], k.shape[2]
        for name, x, shapes in (
            ("key_padding_mask", padding, ((batch, columns), *([(columns,)] if batch == 1 else []))),
            ("attn_mask", mask, ((rows, columns), (batch * self.num_heads, rows, columns))),
        ):
            if x is not None and tuple(x.shape) not in shapes:
                raise ValueError(f"{name}: got shape {tuple(x.shape)}; accepted: {' or '.join(map(str, shapes))}")
        if mask is not None and mask.ndim == 3:
            mask = mask.unflatten(0, (q.shape[0], self.num_heads))
        if padding is not None:
            padding = padding.view(-1, 1, 1, padding.shape[-1])
        masks = [m for m in (mask, padding) if m is not None]
        if all(m.dtype == torch.bool for m in masks):
            return None if not masks else ~masks[0] if len(masks) == 1 else ~(masks[0] | masks[1])
        added = [
            torch.zeros_like(m, dtype=q.dtype).masked_fill(m, -torch.inf) if m.dtype == torch.bool else m for m in masks
        ]
        return added[0] if len(added) == 1 else added[0] + added[1]
