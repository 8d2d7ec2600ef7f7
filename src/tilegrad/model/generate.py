"""Text from a trained model, one token at a time, with the keys and values of what was read kept in CACHE buffers.

    logits = head(ln_f(residual stream at position p, given keys and values of positions < p))
    next token ~ softmax(logits / temperature) over the top_k largest; temperature 0 takes the largest

Sizes change with every token, so this is the managed side of memory: an `AttentionBufferManager` holds the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..kernels.attention.api import attention_fwd, attention_workspace
from ..kernels.rope import rope_table
from ..kernels.scratch import new_scratch
from ..memory.managed.manager import AttentionBufferManager
from ..memory.types import BufferType
from . import reference
from .attention import mask_of
from .config import ModelConfig


class Decoder:
    """A model that has read some tokens. `close` gives the cache back to the manager."""

    def __init__(
        self, config: ModelConfig, params: Mapping[str, Tensor], manager: AttentionBufferManager | None = None
    ) -> None:
        wte = params["wte.weight"]
        self.config, self.params, self.position = config, params, 0
        plain = replace(config, dropout=0.0)
        self.masks = [mask_of(plain, i) for i in range(config.n_layer)]
        self.manager = manager or AttentionBufferManager(device=wte.device)
        shape = (config.n_layer, 2, 1, config.kv_heads, config.block_size, config.head_dim)
        self.cache = self.manager.allocate(BufferType.CACHE, shape, wte.dtype, wte.device)
        if config.position == "rope":
            self.cos, self.sin = (wte.new_empty(config.block_size, config.head_dim // 2) for _ in range(2))
            rope_table(
                config.rope_theta, config.head_dim, config.block_size, config.rope_scaling, cos=self.cos, sin=self.sin
            )

    def feed(self, tokens: Sequence[int]) -> Tensor:
        """Read more tokens; logits (V,) of the one that follows them."""
        config, t = self.config, len(tokens)
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
        ids = torch.tensor(tokens, device=self.cache.device)
        x = reference.residual(self.params, ids, config, self._attend, self.position)
        self.position += t
        return self._logits(reference.norm(self.params, "ln_f", x[-1], config))

    def close(self) -> None:
        self.manager.deallocate(self.cache, BufferType.CACHE)

    def _attend(self, i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """o of block i, after k and v have joined its cache.       q, o (Hq, T, D)   k, v (Hkv, T, D)"""
        start, stop = self.position, self.position + q.shape[1]
        if self.config.position == "rope":
            cos, sin = self.cos[start:stop], self.sin[start:stop]
            q, k = reference.rotate(q, cos, sin), reference.rotate(k, cos, sin)
        keys, values = self.cache[i]
        keys[0, :, start:stop].copy_(k)
        values[0, :, start:stop].copy_(v)
        keys, values = keys[:, :, :stop], values[:, :, :stop]
        mask = self.masks[i]
        scratch = new_scratch(attention_workspace(q[None], keys, values, mask, backward=False), q.device)
        o = torch.empty_like(q[None], memory_format=torch.contiguous_format)
        attention_fwd(q[None], keys, values, mask, o=o, lse=None, scratch=scratch)
        return o[0]

    def _logits(self, n: Tensor) -> Tensor:
        head = reference.head(self.params, self.config)
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
