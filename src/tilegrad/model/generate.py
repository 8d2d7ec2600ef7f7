"""Text from a trained model, one token at a time, with a KV cache in CACHE buffers.

    logits = head(ln_f(residual stream at position p, given keys and values of positions < p))
    next token ~ softmax(logits / temperature) over the top_k largest; temperature 0 takes the largest

A model attends to at most block_size tokens, so only the last block_size of a longer prompt are read. When the cache has
block_size tokens, the window slides: the last ⌈block_size / 2⌉ tokens of the text are read again, from position 0 on. So a
token attends to between ⌈block_size / 2⌉ and block_size tokens, and a slide costs one forward over half a window.

Sizes change with every token, so memory is not planned: an `AttentionBufferManager` allocates the cache.
"""

from __future__ import annotations

import sys
from collections import Counter
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
from .lora import LoraConfig


class Decoder:
    """A model with the KV cache of the tokens read so far. `close` returns the cache to the manager."""

    def __init__(
        self,
        config: ModelConfig,
        params: Mapping[str, Tensor],
        manager: AttentionBufferManager | None = None,
        *,
        tokens: int | None = None,
        lora: LoraConfig | None = None,
    ) -> None:
        """tokens: the size of the cache, which limits the tokens read between two restarts; None: block_size. lora: of the
        adapters in `params`, if there are any."""
        room = config.block_size if tokens is None else min(tokens, config.block_size)
        held = Counter[torch.dtype]()
        for p in params.values():
            held[p.dtype] += p.nbytes
        dtype = held.most_common(1)[0][0]  # frozen parameters may have another on CUDA: the fewer bytes are copied
        params = {name: p.to(dtype) for name, p in params.items()}
        wte = params["wte.weight"]
        self.config, self.params, self.position, self.lora = config, params, 0, lora
        plain = replace(config, dropout=0.0)
        self.masks = [mask_of(plain, i) for i in range(config.n_layer)]
        self.manager = manager or AttentionBufferManager(device=wte.device)
        shape = (config.n_layer, 2, 1, config.kv_heads, room, config.head_dim)
        self.cache = self.manager.allocate(BufferType.CACHE, shape, wte.dtype, wte.device)
        if config.position == "rope":
            self.cos, self.sin = (wte.new_empty(room, config.head_dim // 2) for _ in range(2))
            rope_table(config.rope_theta, config.head_dim, room, config.rope_scaling, cos=self.cos, sin=self.sin)

    def feed(self, tokens: Sequence[int]) -> Tensor:
        """Reads more tokens and returns the logits (V,) of the next."""
        config, t = self.config, len(tokens)
        if t < 1:
            raise ValueError("tokens: got none; accepted: at least one")
        if self.position + t > config.block_size:
            raise ValueError(
                f"tokens: got {self.position + t} in all; accepted: at most block_size, {config.block_size}: "
                "call restart and feed the last of them"
            )
        wrong = [token for token in tokens if not 0 <= token < config.vocab_size]
        if wrong:
            raise ValueError(f"tokens: got {wrong[0]}; accepted: 0 … {config.vocab_size - 1}")
        ids = torch.tensor(tokens, device=self.cache.device)
        x = reference.residual(self.params, ids, config, self._attend, self.position, self.lora)
        self.position += t
        return logits_of(self.params, reference.norm(self.params, "ln_f", x[-1], config), config)

    def restart(self) -> None:
        """Forgets what was read; the next tokens overwrite the cache."""
        self.position = 0

    def close(self) -> None:
        self.manager.deallocate(self.cache, BufferType.CACHE)

    def _attend(self, i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Appends k and v to the cache of block i, and returns o.       q, o (Hq, T, D)   k, v (Hkv, T, D)"""
        start, stop = self.position, self.position + q.shape[1]
        if self.config.position == "rope":
            cos, sin = self.cos[start:stop], self.sin[start:stop]
            q, k = reference.rotate(q, cos, sin), reference.rotate(k, cos, sin)
        keys, values = self.cache[i]
        keys[0, :, start:stop].copy_(k)
        values[0, :, start:stop].copy_(v)
        keys, values = keys[:, :, :stop], values[:, :, :stop]
        mask = self.masks[i]
        o = torch.empty_like(q[None], memory_format=torch.contiguous_format)
        scratch = new_scratch(attention_workspace(q[None], keys, values, mask, backward=False, o=o), q.device)
        attention_fwd(q[None], keys, values, mask, o=o, lse=None, scratch=scratch)
        return o[0]


def logits_of(params: Mapping[str, Tensor], n: Tensor, config: ModelConfig) -> Tensor:
    """The logits of hidden states.       n (C,) or (T, C)   logits (V,) or (T, V)"""
    head = reference.head(params, config)
    if config.loss == "embedding_mse":  # the nearest embedding is the likeliest
        rows = [-(row - head).square().mean(-1) for row in n.view(-1, config.n_embd)]
        return torch.stack(rows).view(*n.shape[:-1], -1)
    return (head @ n.transpose(0, -1)).transpose(0, -1)


class NonFiniteLogits(ValueError):
    """The weights diverged: no token can be drawn."""


class WindowSlides(UserWarning):
    """Generated text is longer than block_size."""


def sliding(config: ModelConfig, prompt_tokens: int, max_tokens: int) -> str | None:
    """The warning if the text does not fit into block_size, else None. The last token is never fed to the model."""
    if prompt_tokens + max_tokens - 1 <= config.block_size:
        return None
    return (
        f"{prompt_tokens + max_tokens:,} tokens are more than block_size, {config.block_size:,}: the window slides, and a "
        f"token attends to the last {_kept_tokens(config):,} to {config.block_size:,} before it"
    )


def _kept_tokens(config: ModelConfig) -> int:
    """Tokens that a slide keeps."""
    return (config.block_size + 1) // 2


def generate(
    config: ModelConfig,
    params: Mapping[str, Tensor],
    prompt: Sequence[int],
    max_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    lora: LoraConfig | None = None,
) -> Iterator[int]:
    """Tokens that follow the prompt, as they come; beyond block_size the window slides. The same seed gives the same tokens.
    lora: of the adapters in `params`, if there are any."""
    if not _int(max_tokens) or max_tokens < 1:
        raise ValueError(f"max_tokens: got {max_tokens!r}; accepted: an int ≥ 1")
    number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not number or not 0.0 <= temperature <= sys.float_info.max:
        raise ValueError(f"temperature: got {temperature!r}; accepted: a number ≥ 0, 0 = always the likeliest")
    if top_k is not None and (not _int(top_k) or top_k < 1):
        raise ValueError(f"top_k: got {top_k!r}; accepted: None or an int ≥ 1")
    if not _int(seed) or not -(1 << 63) <= seed < 1 << 64:
        raise ValueError(f"seed: got {seed!r}; accepted: an int, −2⁶³ … 2⁶⁴ − 1, as torch.Generator takes it")
    return _generate(config, params, prompt, max_tokens, temperature, top_k, seed, lora)


def _generate(
    config: ModelConfig,
    params: Mapping[str, Tensor],
    prompt: Sequence[int],
    max_tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    lora: LoraConfig | None,
) -> Iterator[int]:
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    decoder = Decoder(config, params, tokens=len(text) + max_tokens, lora=lora)
    try:
        logits = decoder.feed(text[-config.block_size :])
        for left in reversed(range(max_tokens)):
            token = _pick(logits.float().cpu(), temperature, top_k, generator)
            yield token
            text.append(token)
            if left and decoder.position == config.block_size:
                decoder.restart()
                logits = decoder.feed(text[-_kept_tokens(config) :])
            elif left:
                logits = decoder.feed([token])
    finally:
        decoder.close()


def _int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _pick(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if not bool(logits.isfinite().all()):
        raise NonFiniteLogits("logits: got values that are not finite; use weights from before the run diverged")
    if temperature == 0.0:
        return int(logits.argmax())
    if top_k is not None and top_k < logits.shape[0]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    scores = (logits.double() - logits.max()) / temperature  # at most 0, and 0 for the likeliest, at any temperature
    return int(torch.multinomial(torch.softmax(scores.float(), -1), 1, generator=generator))
