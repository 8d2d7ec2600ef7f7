"""Text from a trained model, one token at a time, with the keys and values of what was read kept in CACHE buffers.

    logits = head(ln_f(stream(token at position p; keys and values of positions < p)))
    next token ~ softmax(logits / temperature) over the top_k largest; temperature 0 takes the largest

Sizes change with every token, so this is the managed side of memory: an `AttentionBufferManager` holds the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.attention.api import attention_fwd, attention_workspace
from ..kernels.rope import rope_table
from ..memory.managed.manager import AttentionBufferManager
from ..memory.types import BufferType
from .attention import mask_of
from .config import ModelConfig


class Decoder:
    """A model that has read some tokens. `close` gives the cache back to the manager."""

    def __init__(
        self, config: ModelConfig, params: Mapping[str, Tensor], manager: AttentionBufferManager | None = None
    ) -> None:
        wte = params["wte.weight"]
        self.config, self.params, self.position = config, params, 0
        self.mask = mask_of(replace(config, dropout=0.0))
        self.manager = manager or AttentionBufferManager(device=wte.device)
        shape = (config.n_layer, 2, 1, config.kv_heads, config.block_size, config.head_dim)
        self.cache = self.manager.allocate(BufferType.CACHE, shape, wte.dtype, wte.device)
        if config.position == "rope":
            self.cos, self.sin = (wte.new_empty(config.block_size, config.head_dim // 2) for _ in range(2))
            rope_table(config.rope_theta, config.head_dim, config.block_size, cos=self.cos, sin=self.sin)

    def feed(self, tokens: Sequence[int]) -> Tensor:
        """Read more tokens; logits (V,) of the one that follows them."""
        config, p, t = self.config, self.params, len(tokens)
        if t < 1:
            raise ValueError("tokens: got none; accepted: at least one")
        if self.position + t > config.block_size:
            raise ValueError(
                f"tokens: got {self.position + t} in all; accepted: at most block_size, {config.block_size}: "
                "start anew from the last of them"
            )
        wrong = [token for token in tokens if not 0 <= token < config.vocab_size]
        if wrong:
            raise ValueError(f"tokens: got {wrong[0]}; accepted: 0 … {config.vocab_size - 1}")
        x = p["wte.weight"][torch.tensor(tokens, device=p["wte.weight"].device)]
        if config.position == "learned":
            x = x + p["wpe.weight"][self.position : self.position + t]
        for i in range(config.n_layer):
            x = x + self._attention(i, self._norm(f"blocks.{i}.ln1", x))
            x = x + self._feed_forward(f"blocks.{i}.ffn", self._norm(f"blocks.{i}.ln2", x))
        self.position += t
        return self._logits(self._norm("ln_f", x[-1]))

    def close(self) -> None:
        self.manager.deallocate(self.cache, BufferType.CACHE)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        w, b, c = self.params[f"{name}.weight"], self.params.get(f"{name}.bias"), (x.shape[-1],)
        if self.config.norm == "layernorm":
            return F.layer_norm(x, c, w, b, self.config.norm_eps)
        return F.rms_norm(x, c, w, self.config.norm_eps)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.params[f"{name}.weight"], self.params.get(f"{name}.bias"))

    def _heads(self, i: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (T, Hq, D), k and v (T, Hkv, D)."""
        config, name = self.config, f"blocks.{i}.attn"
        if config.projection == "dense":
            rows = self._linear(f"{name}.qkv", x).unflatten(-1, (-1, config.head_dim))
            q, k, v = rows.split([config.n_head, config.kv_heads, config.kv_heads], dim=1)
            return q, k, v
        own = x.unflatten(-1, (config.n_head, config.head_dim))
        q, k, v = (torch.einsum("thi,hoi->tho", own, self.params[f"{name}.{part}.weight"]) for part in "qkv")
        if config.bias:
            q, k, v = (y + self.params[f"{name}.{part}.bias"] for y, part in zip((q, k, v), "qkv", strict=True))
        return q, k, v

    def _attention(self, i: int, x: Tensor) -> Tensor:
        q, k, v = self._heads(i, x)
        start, stop = self.position, self.position + x.shape[0]
        if self.config.position == "rope":
            q, k = self._rotated(q, start, stop), self._rotated(k, start, stop)
        keys, values = self.cache[i]
        keys[0, :, start:stop].copy_(k.transpose(0, 1))
        values[0, :, start:stop].copy_(v.transpose(0, 1))
        keys, values = keys[:, :, :stop], values[:, :, :stop]
        q = q.transpose(0, 1)[None]
        shapes = attention_workspace(q, keys, values, self.mask, backward=False)
        scratch = {name: torch.empty(shape, dtype=dtype, device=x.device) for name, (shape, dtype) in shapes.items()}
        o = torch.empty_like(q, memory_format=torch.contiguous_format)
        attention_fwd(q, keys, values, self.mask, o=o, lse=None, scratch=scratch)
        return self._linear(f"blocks.{i}.attn.proj", o[0].transpose(0, 1).flatten(1))

    def _rotated(self, x: Tensor, start: int, stop: int) -> Tensor:
        cos, sin = self.cos[start:stop, None], self.sin[start:stop, None]
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def _feed_forward(self, name: str, x: Tensor) -> Tensor:
        h, kind = self._linear(f"{name}.up", x), self.config.activation
        if kind == "swiglu":
            a = F.silu(self._linear(f"{name}.gate", x)) * h
        elif kind == "gelu":
            a = F.gelu(h, approximate="tanh")
        else:
            a = torch.tanh(h) if kind == "tanh" else torch.relu(h)
        return self._linear(f"{name}.down", a)

    def _logits(self, n: Tensor) -> Tensor:
        head = self.params["wte.weight" if self.config.tie_embeddings else "lm_head.weight"]
        if self.config.loss == "embedding_mse":
            return -(n - head).square().mean(-1)  # the nearest embedding is the likeliest
        return head @ n


def generate(
    config: ModelConfig, params: Mapping[str, Tensor], prompt: Sequence[int], max_tokens: int, *,
    temperature: float = 1.0, top_k: int | None = None, seed: int = 0,
) -> Iterator[int]:  # fmt: skip
    """Tokens that follow the prompt, as they come. The same seed gives the same tokens."""
    if max_tokens < 1 or len(prompt) + max_tokens > config.block_size:
        room = config.block_size - len(prompt)
        raise ValueError(
            f"max_tokens: got {max_tokens} after {len(prompt)} of the prompt; accepted: 1 … {room} (block_size)"
        )
    if not temperature >= 0.0:
        raise ValueError(f"temperature: got {temperature}; accepted: a number ≥ 0, 0 = always the likeliest")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k: got {top_k}; accepted: None or an int ≥ 1")
    return _generate(config, params, prompt, max_tokens, temperature, top_k, seed)


def _generate(
    config: ModelConfig, params: Mapping[str, Tensor], prompt: Sequence[int], max_tokens: int,
    temperature: float, top_k: int | None, seed: int,
) -> Iterator[int]:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    decoder = Decoder(config, params)
    try:
        logits = decoder.feed(prompt)
        for left in reversed(range(max_tokens)):
            token = _pick(logits.float().cpu(), temperature, top_k, generator)
            yield token
            if left:
                logits = decoder.feed([token])
    finally:
        decoder.close()


def _pick(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0.0:
        return int(logits.argmax())
    if top_k is not None and top_k < logits.shape[0]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    return int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator))
