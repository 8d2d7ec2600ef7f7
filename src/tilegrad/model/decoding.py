"""The two programs of a decoder, made of the layers of the model: `prefill` reads prompts, `step` continues every sequence by
a token.

    prefill   tokens (1, N), packed prompts → hidden states; k and v of every token → the cache; n = the last row of each prompt
    step      tokens (B, 1), the last token of each sequence → hidden states by attention over the cache; n = all rows
    both      logits = n W'        tokens are drawn from the logits with `settings`                 n (B, C)   logits (B, V)

With the key logit_softcap = c, the logits are c tanh(n W' / c).

Both programs are declared on handles, traced and planned together, so they share the memory of their activations. A prefill may
read prompts for some sequences only. The other sequences have `draws` = −1, and their tokens do not change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..kernels.cross_entropy.softcap import softcap_fwd
from ..kernels.embedding import embedding_fwd, embedding_workspace
from ..kernels.embedding_mse import embedding_mse_scores_fwd, embedding_mse_scores_workspace
from ..kernels.linear import linear_fwd, linear_workspace
from ..kernels.residual import copy_fwd
from ..kernels.sampling import SETTINGS, sample_fwd, sample_workspace
from ..kernels.scratch import Form, Scratch
from .config import ModelConfig
from .layer import Buffer, CacheSize, Declare, Param
from .lora import LoraConfig
from .transformer import Transformer, declare

# On CUDA, rows of logits begin at multiples of this many elements: cuBLAS is 4 times slower on unaligned rows.
ALIGNED = 64


@dataclass(frozen=True, slots=True)
class State:
    """The state of each sequence.       int64 (B,), except logprobs, settings (B, 5) float32, seen (B, V) uint8

    tokens      the last token that was drawn, −1 if its logits were not finite
    logprobs    log softmax(logits) of this token
    active      1 for sequences that continue, else 0
    seen        1 for tokens that the sequence contains; only with a repetition penalty
    """

    tokens: Buffer
    logprobs: Buffer
    settings: Buffer
    seeds: Buffer
    sequences: Buffer
    active: Buffer
    seen: Buffer | None

    @classmethod
    def declare(cls, at: Declare, batch_size: int, *, penalties: bool) -> State:
        def buffer(name: str, *shape: int, dtype: torch.dtype = torch.int64) -> Buffer:
            return at.buffer(f"state.{name}", (batch_size, *shape), dtype, role="inputs")

        return cls(
            tokens=buffer("tokens"),
            logprobs=buffer("logprobs", dtype=at.accumulation_dtype),
            settings=buffer("settings", SETTINGS, dtype=torch.float32),
            seeds=buffer("seeds"),
            sequences=buffer("sequences"),
            active=buffer("active"),
            seen=buffer("seen", at.config.vocab_size, dtype=torch.uint8) if penalties else None,
        )


@dataclass(frozen=True, slots=True)
class Sampler:
    """The head of a decoder: rows of the output of ln_f → logits → `state.tokens`.

    last     (B, 1) int64, in a prefill: the row of the last token of each prompt
    draws    (B,) int64: how many tokens each sequence has drawn, or −1 if it draws none now
    """

    w: Param
    loss: str
    softcap: float
    invariant: bool
    state: State
    last: Buffer | None
    draws: Buffer
    n: Buffer | None
    rounded: Buffer | None  # for bfloat16 on a CPU: the logits that the product writes
    logits: Buffer  # the logits in the accumulation dtype
    gather_scratch: Scratch
    product_scratch: Scratch
    scratch: Scratch

    @classmethod
    def declare(cls, at: Declare, w: Param, batch_size: int, *, penalties: bool) -> Sampler:
        c, acc = at.config, at.accumulation_dtype
        rows = Form((batch_size, c.n_embd), at.dtype, at.device)
        pitch = None if at.device.type == "cpu" else -(-c.vocab_size // ALIGNED) * ALIGNED
        logits = at.buffer("logits", (batch_size, c.vocab_size), acc, pitch=pitch)
        rounds = at.device.type == "cpu" and at.dtype != acc and c.loss == "cross_entropy"
        if c.loss == "cross_entropy":
            product = linear_workspace(rows, w.value, backward=False, bias=False, invariant=at.invariant)
        else:
            product = embedding_mse_scores_workspace(rows, w.value)
        gathers = not at.decodes
        return cls(
            w=w,
            loss=c.loss,
            softcap=c.softcap,
            invariant=at.invariant,
            state=State.declare(at, batch_size, penalties=penalties),
            last=at.buffer("inputs.last", (batch_size, 1), torch.int64, role="inputs") if gathers else None,
            draws=at.buffer("inputs.draws", (batch_size,), torch.int64, role="inputs"),
            n=at.buffer("last_rows", (batch_size, c.n_embd)) if gathers else None,
            rounded=at.buffer("rounded_logits", (batch_size, c.vocab_size)) if rounds else None,
            logits=logits,
            gather_scratch=at.scratch("gather", embedding_workspace(rows) if gathers else {}),
            product_scratch=at.scratch("logits", product),
            scratch=at.scratch("sampling", sample_workspace(Form((batch_size, c.vocab_size), acc, at.device))),
        )

    def forward(self, n: Buffer) -> None:
        if self.last is not None and self.n is not None:
            embedding_fwd(self.last, n, None, x=self.n, scratch=self.gather_scratch)  # n[last]
            n = self.n
        if self.loss == "cross_entropy":
            y = self.logits if self.rounded is None else self.rounded
            linear_fwd(n, self.w.value, None, y=y, invariant=self.invariant, scratch=self.product_scratch)
        else:
            embedding_mse_scores_fwd(n, self.w.value, scores=self.logits, scratch=self.product_scratch)
        if self.rounded is not None:
            copy_fwd(self.rounded, y=self.logits)
        if self.softcap:
            softcap_fwd(self.logits, self.softcap, y=self.logits, invariant=self.invariant)
        s = self.state
        reads = self.logits, s.settings, s.seeds, s.sequences, self.draws
        sample_fwd(*reads, tokens=s.tokens, logprobs=s.logprobs, seen=s.seen, scratch=self.scratch)


@dataclass(frozen=True, slots=True)
class Decoding:
    """A model with the head that draws tokens.

    slots        (N,) int64, in a prefill: see `Cache` in model/attention.py
    positions    (B,) int64, in a step: the number of tokens of each sequence in the cache
    """

    model: Transformer
    sampler: Sampler
    slots: Buffer | None
    positions: Buffer | None

    def run(self) -> None:
        self.sampler.forward(self.model.hidden_states())


def declare_decoding(
    config: ModelConfig,
    size: CacheSize,
    dtype: torch.dtype,
    device: torch.device,
    *,
    prefill_tokens: int | None,
    penalties: bool,
    lora: LoraConfig | None,
    invariant: bool,
) -> Decoding:
    """Declares the step or, with prefill_tokens, the prefill of that many tokens from at most size.sequences prompts."""
    prefill = prefill_tokens is not None
    at = Declare(
        replace(config, dropout=0.0),
        1 if prefill else size.sequences,
        prefill_tokens or 1,
        dtype,
        device,
        documents=size.sequences + 1 if prefill else 0,  # the prompts, and a document of added rows (engine/decoder.py)
        lora=None if lora is None else replace(lora, dropout=0.0),
        invariant=invariant,
        cache=size,
    )
    model = declare(at)
    sampler = Sampler.declare(at, model.head.w, size.sequences, penalties=penalties)
    cache = model.blocks[0].attention.cache
    return Decoding(model, sampler, cache.slots if cache else None, cache.positions if cache else None)
