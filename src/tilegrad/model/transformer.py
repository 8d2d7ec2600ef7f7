"""The whole model as one tree of buffers and three programs on it.

    x = scale · wte[tokens] + wpe[position]       blocks       n = ln_f(x)       loss(n, targets) over wte or lm_head

With the key residual_scalars each block reads a x + b x0 with learned a and b (model/residual.py), and dx0 is the sum of all
blocks' gradients of x0.

`step` computes the loss and its gradient in one pass, then the rest of the backward. `forward` and `backward` compute the same
in two calls, and the loss twice. Declared on handles, the tree is traced and planned; bound to tensors, it trains.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from ..kernels.cross_entropy import cross_entropy_bwd, cross_entropy_fwd, cross_entropy_workspace
from ..kernels.cross_entropy.terms import Terms
from ..kernels.embedding import embedding_bwd, embedding_fwd, embedding_workspace
from ..kernels.embedding_mse import embedding_mse_bwd, embedding_mse_fwd, embedding_mse_workspace
from ..kernels.fp8_head import fp8_cross_entropy_step, fp8_cross_entropy_workspace
from ..kernels.fp8_linear import Factor, fill_state, fp8_scale_step
from ..kernels.residual import add_fwd, copy_fwd, zero_fwd
from ..kernels.rope import rope_table
from ..kernels.scratch import Scratch
from ..text.spelling import did_you_mean
from .block import Block, Dropout, Recomputed
from .config import ModelConfig
from .fp8 import Rounded, RoundedWeight
from .layer import WEIGHT, Buffer, Declare, Packed, Param, is_adapter
from .norm import NormLayer

NOTHING: frozenset[Recomputed] = frozenset()


@dataclass(frozen=True, slots=True)
class Embedding:
    """x = scale · wte[tokens] + wpe[position]       tokens (B, T) int64   x, dx (N, C)"""

    wte: Param
    wpe: Param | None
    positions: Buffer | None  # with wpe: the positions of packed rows or of a decoder's step
    scale: float  # embedding_scale
    tied: bool  # the head's backward, which runs first, also writes wte's gradient
    scratch: Scratch

    @classmethod
    def declare(cls, at: Declare) -> Embedding:
        c, channels = at.config, at.config.n_embd
        wte = at.param("wte.weight", c.vocab_size, channels, init=WEIGHT)
        wpe = at.param("wpe.weight", c.block_size, channels, init=WEIGHT) if c.position == "learned" else None
        positions = at.positions if wpe else None
        scale = float(c.embedding_scale)
        shapes = embedding_workspace(at.form(channels), packed=positions is not None, scaled=scale != 1.0)
        return cls(wte, wpe, positions, scale, c.tie_embeddings, at.scratch("embedding", shapes))

    def forward(self, tokens: Buffer, *, x: Buffer) -> None:
        wpe = self.wpe.value if self.wpe else None
        embedding_fwd(tokens, self.wte.value, wpe, self.positions, self.scale, x=x, scratch=self.scratch)

    def backward(self, dx: Buffer, tokens: Buffer) -> None:
        if self.wpe and self.wpe.grad is not None:
            given, dwpe, accumulate = (dx, tokens, self.positions), self.wpe.grad, self.wpe.accumulate
            embedding_bwd(*given, dwpe=dwpe, accumulate=accumulate, scratch=self.scratch)
        if self.wte.grad is not None:
            accumulate = self.wte.accumulate or (self.tied and self.wte.total is None)
            rows = (dx, tokens, None, self.scale)
            embedding_bwd(*rows, dwte=self.wte.grad, accumulate=accumulate, scratch=self.scratch)
        if self.wpe:
            self.wpe.keep()
        self.wte.keep(again=self.tied)

    @property
    def trained(self) -> bool:
        return self.wte.grad is not None or (self.wpe is not None and self.wpe.grad is not None)


@dataclass(frozen=True, slots=True)
class Fp8Head:
    """n (N, C) and the head's weight (V, C) in float8."""

    n: Rounded
    w: RoundedWeight

    @classmethod
    def declare(cls, at: Declare, w: Param) -> Fp8Head:
        place = ("scratch.head.x8", "scratch.head.x8t" if w.grad is not None else None)
        n = Rounded.declare(at, "head.input", "x", (at.n, at.config.n_embd), *place)
        return cls(n, RoundedWeight.declare(at, "head.weight", w.value))

    def of(self, n: Buffer) -> tuple[Buffer, Buffer | None, Buffer, Buffer, Buffer | None, Buffer]:
        """Rounds n. Returns (x8, x8t, the scale state of x, w8, w8t, the scale state of w)."""
        self.n.of(n)
        x, w = self.n, self.w.rounded
        assert x.rows is not None and w.rows is not None
        return x.rows, x.columns, x.state, w.rows, w.columns, w.state


@dataclass(frozen=True, slots=True)
class Head:
    """loss and dn from n (N, C), the rows of the head's weight, and targets (N,); −1 = no target. dn overwrites n.
    With the key logit_softcap, the logits are capped before the loss."""

    w: Param
    kind: str
    terms: Terms
    invariant: bool
    targets: Buffer
    inv_total: Buffer
    loss: Buffer
    fp8: Fp8Head | None
    forward_scratch: Scratch
    backward_scratch: Scratch

    @classmethod
    def declare(cls, at: Declare, wte: Param) -> Head:
        c = at.config
        tied = c.tie_embeddings
        w = wte if tied else at.param("lm_head.weight", c.vocab_size, c.n_embd, init=WEIGHT)
        x, terms = at.form(c.n_embd), Terms(c.softcap)
        if at.head == "fp8":
            forward = fp8_cross_entropy_workspace(x, w.value, backward=False)
            backward = fp8_cross_entropy_workspace(x, w.value, backward=True, accumulate=w.accumulate)
        elif c.loss == "cross_entropy":
            forward = cross_entropy_workspace(x, w.value, backward=False, invariant=at.invariant, terms=terms)
            backward = cross_entropy_workspace(x, w.value, backward=True, invariant=at.invariant, terms=terms)
        else:
            forward = backward = embedding_mse_workspace(x, w.value)
        return cls(
            w=w,
            kind=c.loss,
            terms=terms,
            invariant=at.invariant,
            targets=at.buffer("inputs.targets", (at.n,), torch.int64, role="inputs"),
            inv_total=at.buffer("inputs.inv_total", (), at.accumulation_dtype, role="inputs"),
            loss=at.buffer("head.loss", (), at.accumulation_dtype, role="inputs"),  # read after the program: persistent
            fp8=Fp8Head.declare(at, w) if at.head == "fp8" else None,
            forward_scratch=at.scratch("loss", forward),
            backward_scratch=at.scratch("loss_bwd", backward),
        )

    def forward(self, n: Buffer) -> None:
        given, scratch = (n, self.w.value, self.targets, self.inv_total), self.forward_scratch
        if self.fp8 is not None:
            softcap = self.terms.softcap
            fp8_cross_entropy_step(*self.fp8.of(n), *given[2:], loss=self.loss, softcap=softcap, scratch=scratch)
        elif self.kind == "cross_entropy":
            cross_entropy_fwd(*given, loss=self.loss, invariant=self.invariant, terms=self.terms, scratch=scratch)
        else:
            embedding_mse_fwd(*given, loss=self.loss, scratch=scratch)

    def backward(self, n: Buffer, *, loss: bool) -> None:
        """dn and dw, and the loss on request."""
        inputs, scratch = (n, self.w.value, self.targets, self.inv_total), self.backward_scratch
        dw = "dwte" if self.kind == "embedding_mse" else "dw"
        out: dict[str, Any] = {"dx": n, dw: self.w.grad, "accumulate": self.w.accumulate}
        if loss:
            out["loss"] = self.loss
        if self.fp8 is not None:
            fp8_cross_entropy_step(*self.fp8.of(n), *inputs[2:], **out, softcap=self.terms.softcap, scratch=scratch)
        elif self.kind == "cross_entropy":
            cross_entropy_bwd(*inputs, **out, invariant=self.invariant, terms=self.terms, scratch=scratch)
        else:
            embedding_mse_bwd(*inputs, **out, scratch=scratch)
        self.w.keep()


@dataclass(frozen=True, slots=True)
class Transformer:
    embedding: Embedding
    drop: Dropout
    blocks: tuple[Block, ...]
    ln_f: NormLayer
    head: Head
    tokens: Buffer  # (B, T) int64
    packed: Packed | None
    seeds: tuple[Buffer, ...]  # one 0-d int64 per block with dropout, else none
    x: tuple[Buffer, ...]  # the residual stream before each block and after the last, (N, C)
    dx: Buffer
    dx0: Buffer | None  # with residual_scalars
    params: dict[str, Param]
    scales: dict[str, Buffer]  # by the name of a tensor that is rounded to float8
    factors: dict[str, Factor]  # by the same names: which factor of a product the tensor is
    rounded: tuple[RoundedWeight, ...]
    jumps: Buffer | None  # 0-d float32: how many magnitudes grew 100-fold in the last step; None without scales

    def initialise(self, config: ModelConfig, generator: torch.Generator) -> None:
        """Fills each parameter as its layer declares it, and the tables."""
        for p in self.in_draw_order:
            p.init.fill(p.master, generator)
        self.fill_tables(config)

    @property
    def in_draw_order(self) -> list[Param]:
        """The parameters, adapters last, so that the others get the same initial values as without adapters."""
        return sorted(self.params.values(), key=lambda p: is_adapter(p.name))

    @property
    def trained(self) -> list[Param]:
        """The parameters that are not frozen."""
        return [p for p in self.params.values() if p.grad is not None]

    def fill_tables(self, config: ModelConfig) -> None:
        """Fills the scale states of float8, and the tables of rope, which all blocks share."""
        for name, state in self.scales.items():
            fill_state(state, self.factors[name])
        rope = self.blocks[0].attention.rope
        if rope is not None:
            rope_table(
                config.rope_theta, rope.head_dim, config.block_size, config.rope_scaling, cos=rope.cos, sin=rope.sin
            )

    def round_weights(self) -> None:
        """Rounds the masters into the compute copies, if there are any."""
        for p in self.params.values():
            if p.value.dtype != p.master.dtype:
                copy_fwd(p.master, y=p.value)

    def draw_seeds(self, seed: int, draw: int) -> list[int]:
        """Dropout's seeds of one draw: block i takes the first 64 bits of sha256("seed:draw:i")."""
        digests = (hashlib.sha256(f"{seed}:{draw}:{i}".encode()).digest() for i in range(len(self.seeds)))
        return [int.from_bytes(digest[:8], "little", signed=True) for digest in digests]

    def forward(self) -> None:
        self.scale_step()
        self._round_to_float8()
        self.head.forward(self.hidden_states())

    def backward(self) -> None:
        self.head.backward(self.ln_f.y, loss=False)
        self.hidden_states_backward()

    def step(self) -> None:
        if not self.head.w.adds:
            self.scale_step()
            self._round_to_float8()
        self.head.backward(self.hidden_states(), loss=True)
        self.hidden_states_backward()

    def scale_step(self) -> None:
        """Updates the float8 scales from the values seen since the last step."""
        if self.jumps is not None:
            fp8_scale_step(states=list(self.scales.values()), jumps=self.jumps)

    def _round_to_float8(self) -> None:
        """Rounds the weights of float8 products."""
        for weight in self.rounded:
            weight.rounded.of(weight.value)

    @property
    def stream(self) -> tuple[tuple[Block, Buffer, NormLayer, Buffer], ...]:
        """(block, its input x, the next norm, the block's output y, which this norm computes)"""
        next_norms = (*(block.norm1 for block in self.blocks[1:]), self.ln_f)
        return tuple(zip(self.blocks, self.x[:-1], next_norms, self.x[1:], strict=True))

    def hidden_states(self) -> Buffer:
        """tokens → ln_f's output."""
        self.embedding.forward(self.tokens, x=self.x[0])
        self.drop.forward(self.x[0])
        if self.dx0 is None:
            self.blocks[0].norm1.forward(self.x[0])
        for block, x, next_norm, y in self.stream:
            if block.scalars is not None:
                x = block.scalars.forward(x, self.x[0])
                block.norm1.forward(x)
            block.forward(x)
            if block.scalars is not None and next_norm is not self.ln_f:
                add_fwd(block.x1, block.f, y=y)
            else:
                next_norm.forward(block.x1, block.f, x1=y)
        return self.ln_f.y

    def hidden_states_backward(self) -> None:
        """The backward ends with the first block that has a trained parameter: earlier blocks need no gradient."""
        first = self._first_trained()
        if first > len(self.blocks):
            return
        zero_fwd(x=self.dx)
        dx_sums = (None, *(block.last_bias_grad for block in self.blocks))  # for each block's norm1, and ln_f
        self.ln_f.backward(self.ln_f.y, self.x[-1], dx=self.dx, dx_sum=dx_sums[-1], recompute=False)
        if self.dx0 is not None:
            zero_fwd(x=self.dx0)
        for (block, x, *_), dx_sum in tuple(zip(self.stream, dx_sums[:-1], strict=True))[first:][::-1]:
            if block.scalars is None or self.dx0 is None:
                block.backward(x, dx=self.dx, dx_sum=dx_sum)
            else:
                block.backward(block.scalars.forward(x, self.x[0]), dx=self.dx, dx_sum=dx_sum)
                block.scalars.backward(x, self.x[0], dx=self.dx, dx0=self.dx0)
        if self.dx0 is not None:
            add_fwd(self.dx, self.dx0, y=self.dx)
        for p in self._small:
            p.keep()
        if self.embedding.trained:
            self.embedding.backward(self.drop.backward(self.dx), self.tokens)

    @property
    def _small(self) -> list[Param]:
        """The trained weights of norms, biases, scalars and adapters: no layer calls their `keep`."""
        tables = [block.attention.values.table for block in self.blocks if block.attention.values is not None]
        kept = [p.name for p in (self.embedding.wte, self.embedding.wpe, self.head.w, *tables) if p is not None]
        return [p for p in self.trained if not p.matrices and p.name not in kept]

    def _first_trained(self) -> int:
        """Index of the first block whose backward runs; n_layer if only ln_f's backward runs; n_layer + 1 if none runs."""
        if self.embedding.trained:
            return 0
        layers = [p.name.split(".")[:2] for p in self.trained]
        blocks = [int(i) for layer, i in layers if layer == "blocks"]
        return min([*blocks, len(self.blocks) + (["ln_f", "weight"] not in layers and ["ln_f", "bias"] not in layers)])


def declare(at: Declare, recompute: Sequence[frozenset[Recomputed]] = ()) -> Transformer:
    """The model on the handles that `at` declares. recompute: what each block recomputes, from the first on; blocks that are
    not listed recompute nothing."""
    config, lora, c, n_layer = at.config, at.lora, at.config.n_embd, at.config.n_layer
    embedding = Embedding.declare(at)
    count = n_layer if config.dropout or (lora is not None and lora.dropout) else 0
    seeds = tuple(at.buffer(f"inputs.seed.{i}", (), torch.int64, role="inputs") for i in range(count))
    choices = (*recompute, *(NOTHING,) * (n_layer - len(recompute)))
    x = tuple(at.rows(f"blocks.{i}.x" if i < n_layer else "ln_f.x", c) for i in range(n_layer + 1))
    return Transformer(
        embedding=embedding,
        drop=Dropout.declare(at, seeds[0] if seeds else None, 0, dx="dx"),
        blocks=tuple(Block.declare(at, i, seeds[i] if seeds else None, choices[i]) for i in range(n_layer)),
        ln_f=NormLayer.declare(at, "ln_f"),
        head=Head.declare(at, embedding.wte),
        tokens=at.tokens,
        packed=at.packed,
        seeds=seeds,
        x=x,
        dx=at.rows("dx", c),
        dx0=at.rows("dx0", c) if config.residual_scalars else None,
        params=at.params,
        scales=at.scales,
        factors=at.factors,
        rounded=tuple(at.rounded.values()),
        jumps=at.buffer("scale.jumps", (), torch.float32, role="optimizer") if at.scales else None,
    )


def parameters(config: ModelConfig) -> dict[str, Param]:
    """The parameters on handles, all trained, in float32."""
    return declare(Declare(config, 1, 1, torch.float32, torch.device("cpu"))).params


def check_frozen(model: Transformer, freeze: tuple[str, ...]) -> None:
    """Refuse a pattern that matches no parameter, and patterns that freeze all parameters."""
    for pattern in freeze:
        if not any(fnmatchcase(name, pattern) for name in model.params):
            meant = did_you_mean(pattern, list(model.params))
            raise ValueError(
                f"freeze: got {pattern!r}, which no parameter matches{meant}; accepted: names or patterns such as "
                "'wte.*', 'blocks.0.*' or '*.bias'"
            )
    if not model.trained:
        got = ", ".join(map(repr, freeze))
        raise ValueError(f"freeze: got {got}, which freeze every parameter; accepted: patterns that leave at least one")
