"""Low-rank adapters of linear layers whose weights are frozen.

    u = s drop(x) A'       y_i += u_i B_i'           s = alpha / rank        x (N, Cin)   y_i (N, width)   u, du (N, P·r)
    du_i = s dy_i B_i      dB_i += dy_i' u_i         dA += du' drop(x)       dx += drop'(du A)
Saved: u. The adapted layers save or recompute x. The backward draws the dropout mask again.

The P layers that read the same x (q, k, v; gate, up) are the parts of one adapter. Their A are stacked, (P·r, Cin), so that x
is read once; each part has its own B_i (width, r). A is initialised uniformly in ±1/√Cin, and B to 0, as in PEFT.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..kernels.checks import is_count, is_number
from ..kernels.dropout import dropout_fwd, dropout_workspace
from ..kernels.linear import linear_bwd_input, linear_fwd
from ..kernels.low_rank import Part, join_fwd, joins, low_rank_bwd, low_rank_bwd_a, low_rank_workspace
from ..kernels.residual import add_fwd
from ..kernels.scratch import Scratch
from ..text.spelling import did_you_mean
from ..text.untrusted import refuse
from .config import LIMITS, ModelConfig
from .layer import Buffer, Constant, Declare, Param, Uniform

# The inputs of the linear layers of a block, in the order of its forward.
INPUTS = ("attn.in", "attn.proj", "ffn.in", "ffn.down")
GROUPS = {"attention": ("q", "k", "v", "qkv", "proj"), "ffn": ("gate", "up", "down")}
LAYERS = tuple(name for names in GROUPS.values() for name in names)


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Adapters of rank `rank`, scaled by alpha / rank; every other parameter is frozen.

    layers    "all", "attention", "ffn", or names out of q, k, v, qkv, proj, gate, up, down
    dropout   the probability that an adapter drops an entry of its input x

    >>> import tilegrad
    >>> config = tilegrad.ModelConfig(vocab_size=5, block_size=8, n_layer=1, n_head=2, n_embd=16)
    >>> engine = tilegrad.Engine(config, batch_size=2, seq_len=4, lora=tilegrad.LoraConfig(rank=2, alpha=4, layers="ffn"))
    >>> sorted(engine.grads)[:2]
    ['blocks.0.ffn.down.lora_a', 'blocks.0.ffn.down.lora_b']
    """

    rank: int = 16
    alpha: float = 32.0
    layers: str | tuple[str, ...] = "all"
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def __post_init__(self) -> None:
        if not is_count(self.rank, LIMITS["n_embd"]):
            refuse(self, "lora.rank", f"an int ≥ 1, at most {LIMITS['n_embd']:,}")
        for name in ("alpha", "dropout"):
            value = getattr(self, name)
            if not is_number(value) or not abs(value) <= sys.float_info.max:
                refuse(self, f"lora.{name}", "a finite number")
        if self.alpha <= 0:
            refuse(self, "lora.alpha", "a number > 0")
        if not 0.0 <= self.dropout < 1.0:
            refuse(self, "lora.dropout", "a number, 0 ≤ dropout < 1")
        groups = ("all", *GROUPS)
        accepted = f"{', '.join(map(repr, groups))}, or names out of {', '.join(LAYERS)}"
        if isinstance(self.layers, str):
            if self.layers not in groups and self.layers not in LAYERS:
                raise ValueError(
                    f"lora.layers: got {self.layers!r}{did_you_mean(self.layers, [*groups, *LAYERS])}; "
                    f"accepted: {accepted}"
                )
            return
        names: object = self.layers
        if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
            refuse(self, "lora.layers", accepted)
        group = next((name for name in self.layers if name in groups), None)
        if group is not None:
            refuse(self, "lora.layers", f"{group!r} alone, or names out of {', '.join(LAYERS)}")
        unknown = [name for name in self.layers if name not in LAYERS]
        if unknown:
            raise ValueError(f"lora.layers: got {unknown[0]!r}{did_you_mean(unknown[0], LAYERS)}; accepted: {accepted}")
        if len(set(self.layers)) != len(self.layers):
            refuse(self, "lora.layers", f"each name once, out of {', '.join(LAYERS)}")
        object.__setattr__(self, "layers", tuple(self.layers))


class AdapterParts(NamedTuple):
    """One input of a block, and the adapted layers that read it."""

    name: str  # one of INPUTS
    inputs: int  # number of channels of x
    widths: dict[str, int]  # part → number of columns of its output, in the order of the rows of A

    def a_name(self, block: int) -> str:
        """The name of A (P·r, inputs)."""
        return f"blocks.{block}.{self.name}.lora_a"

    def b_name(self, block: int, part: str) -> str:
        """The name of B (width, r) of a part."""
        return f"blocks.{block}.{self.name.split('.')[0]}.{part}.lora_b"


def adapter_parts(config: ModelConfig, lora: LoraConfig) -> tuple[AdapterParts, ...]:
    """The adapters of every block of this model, and their parts. In GPT-2, q, k and v are one layer, qkv, as in PEFT.

    >>> import tilegrad
    >>> [(a.name, list(a.widths)) for a in adapter_parts(tilegrad.presets()["llama-135m"].model, LoraConfig(layers="all"))]
    [('attn.in', ['q', 'k', 'v']), ('attn.proj', ['proj']), ('ffn.in', ['gate', 'up']), ('ffn.down', ['down'])]
    """
    c, d = config.n_embd, config.head_dim
    q, kv = config.n_head * d, config.kv_heads * d
    separate = config.position == "rope" or config.qk_norm or config.projection == "per_head"
    ffn = {"gate": config.ffn} if config.activation == "swiglu" else {}
    channels: tuple[tuple[int, dict[str, int]], ...] = (
        (c, {"q": q, "k": kv, "v": kv} if separate else {"qkv": q + 2 * kv}),
        (q, {"proj": c}),
        (c, ffn | {"up": config.ffn}),
        (config.ffn, {"down": c}),
    )
    adapters = [AdapterParts(name, *each) for name, each in zip(INPUTS, channels, strict=True)]
    has = [part for adapter in adapters for part in adapter.widths]
    if isinstance(lora.layers, tuple):
        chosen = lora.layers
    elif lora.layers in ("all", *GROUPS):
        chosen = tuple(part for part in has if lora.layers == "all" or part in GROUPS[lora.layers])
    else:
        chosen = (lora.layers,)
    for name in chosen:
        if name not in has:
            raise ValueError(f"lora.layers: got {name!r}, which this model does not have; accepted: {', '.join(has)}")
    adapters = [a._replace(widths={part: a.widths[part] for part in a.widths if part in chosen}) for a in adapters]
    return tuple(a for a in adapters if a.widths)


class LowRank(NamedTuple):
    """The terms that an adapter adds to the output of a layer: y_i += u_i B_i' for each part of the output."""

    u: Buffer
    bs: list[Buffer]
    parts: tuple[Part, ...]
    joined: Buffer | None  # [x, u], if it is multiplied by [W, B_i]
    wb: Buffer | None  # the buffer of [W, B_i]
    scratch: Scratch


@dataclass(frozen=True, slots=True)
class InputDropout:
    """Dropout of the input of an adapter. `dropped` (N, Cin) receives drop(x), and in the backward du A."""

    p: float
    seed: Buffer
    counter: int
    dropped: Buffer
    scratch: Scratch


class BaseLayer(Protocol):
    """The attributes of an adapted LinearLayer that its adapter reads."""

    @property
    def w(self) -> Param: ...
    @property
    def fp8(self) -> object | None: ...


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter of one input x, and of the layers that read it."""

    a: Param
    bs: tuple[Param, ...]
    parts: tuple[Part, ...]
    u: Buffer
    du: Buffer
    joined: Buffer | None  # [x, u]
    wb: tuple[Buffer | None, ...]  # [W, B_i] of each output; None if its product is not joined
    dy_du: Buffer | None  # [dy, du] of the first output, if dx = [dy, du] [W; A]
    wa: Buffer | None  # [W; A]
    scale: float
    drop: InputDropout | None
    forward_scratch: Scratch
    backward_scratch: Scratch

    @classmethod
    def declare(
        cls,
        at: Declare,
        block: int,
        name: str,
        layers: Sequence[BaseLayer],
        outputs: Mapping[str, tuple[int, int]],
        seed: Buffer | None,
    ) -> Adapter | None:
        """The adapter of input `name`, or None if that input has none. layers: the layers that read the input, one for each
        output. outputs: part → (index of its output, its first column in that output)."""
        lora = at.lora
        adapters = [a for a in adapter_parts(at.config, lora) if a.name == name] if lora is not None else []
        if lora is None or not adapters:
            return None
        adapter, r = adapters[0], lora.rank
        rows, x = r * len(adapter.widths), at.form(adapter.inputs)
        a = at.param(adapter.a_name(block), rows, adapter.inputs, init=Uniform(1 / math.sqrt(adapter.inputs)))
        bs = tuple(
            at.param(adapter.b_name(block, part), width, r, init=Constant(0.0))
            for part, width in adapter.widths.items()
        )
        drop = None
        if lora.dropout and seed is not None:
            # Counters of adapters follow those of the blocks.
            counter = 2 * at.config.n_layer + 1 + len(INPUTS) * block + INPUTS.index(name)
            dropped, scratch = at.rows(f"scratch.{name}.dropped", adapter.inputs), dropout_workspace(x)
            drop = InputDropout(lora.dropout, seed, counter, dropped, at.scratch(f"{name}.dropout", scratch))
        values = [b.value for b in bs]
        parts = tuple(Part(outputs[part][0], i * r, outputs[part][1]) for i, part in enumerate(adapter.widths))

        def joined_weight(i: int, layer: BaseLayer) -> Buffer | None:
            """The buffer of [W, B_i] of output i; None if the product is not joined."""
            w, read = layer.w.value, i in {part.output for part in parts}
            if layer.fp8 is not None or not read or not joins(w, at.dtype, adapter.inputs, w.shape[0]):
                return None
            return at.buffer(f"scratch.{name}.wb{i}", (w.shape[0], adapter.inputs + rows))

        wb = tuple(joined_weight(i, layer) for i, layer in enumerate(layers))
        joins_x = any(each is not None for each in wb)
        joined = at.rows(f"scratch.{name}.joined", adapter.inputs + rows) if joins_x else None
        w, dy_du, wa = layers[0].w.value, None, None
        if drop is None and layers[0].fp8 is None and joins(w, at.dtype, w.shape[0], adapter.inputs):
            dy_du = at.rows(f"scratch.{name}.dy_du", w.shape[0] + rows)
            wa = at.buffer(f"scratch.{name}.wa", (w.shape[0] + rows, adapter.inputs))
        return cls(
            a=a,
            bs=bs,
            parts=parts,
            joined=joined,
            wb=wb,
            dy_du=dy_du,
            wa=wa,
            u=at.rows(f"blocks.{block}.{name}.u", rows),
            du=at.rows(f"scratch.{name}.du", rows),
            scale=lora.scale,
            drop=drop,
            forward_scratch=at.scratch(f"{name}.lora", low_rank_workspace(x, a.value, values, backward=False)),
            backward_scratch=at.scratch(f"{name}.lora_bwd", low_rank_workspace(x, a.value, values, backward=True)),
        )

    def forward(self, x: Buffer) -> None:
        """u = s drop(x) A', and [x, u]"""
        linear_fwd(self._dropped(x), self.a.value, None, y=self.u, scale=self.scale, scratch=self.forward_scratch)
        if self.joined is not None:
            join_fwd(x, self.u, joined=self.joined)

    def of(self, output: int) -> LowRank | None:
        """The terms for output number `output`; None if the adapter adds nothing to it."""
        chosen = [
            (b.value, at._replace(output=0)) for b, at in zip(self.bs, self.parts, strict=True) if at.output == output
        ]
        if not chosen:
            return None
        bs, parts = zip(*chosen, strict=True)
        return LowRank(self.u, list(bs), tuple(parts), self.joined, self.wb[output], self.forward_scratch)

    def backward(self, *dys: Buffer) -> None:
        """du_i = s dy_i B_i   dB_i += dy_i' u_i. dys: the gradients of the outputs"""
        low_rank_bwd(
            list(dys),
            self.u,
            [b.value for b in self.bs],
            self.parts,
            self.scale,
            du=self.du,
            dbs=[b.grad for b in self.bs],
            accumulate=self.a.accumulate,
            scratch=self.backward_scratch,
        )

    def add_backward(self, *, dx: Buffer) -> None:
        """dx += drop'(du A)"""
        if self.drop is None:
            linear_bwd_input(self.du, self.a.value, dx=dx, accumulate=True, scratch=self.backward_scratch)
            return
        drop, dropped = self.drop, self.drop.dropped
        linear_bwd_input(self.du, self.a.value, dx=dropped, accumulate=False, scratch=self.backward_scratch)
        dropout_fwd(dropped, drop.seed, drop.p, drop.counter, y=dropped, scratch=drop.scratch)
        add_fwd(dx, dropped, y=dx)

    def backward_weight(self, x: Buffer) -> None:
        """dA += du' drop(x)"""
        if self.a.grad is not None:
            low_rank_bwd_a(
                self.du,
                self._dropped(x),
                self.a.value,
                da=self.a.grad,
                accumulate=self.a.accumulate,
                scratch=self.backward_scratch,
            )

    def _dropped(self, x: Buffer) -> Buffer:
        """drop(x); x itself without dropout."""
        if self.drop is None:
            return x
        drop = self.drop
        dropout_fwd(x, drop.seed, drop.p, drop.counter, y=drop.dropped, scratch=drop.scratch)
        return drop.dropped
