"""Low-rank adapters of linear layers whose weights are frozen.

    u = drop(x) Aᵀ          y_i += s u_i B_iᵀ          s = alpha / rank        x (N, Cin)   y_i (N, width)   u (N, P·r)
    du_i = s dy_i B_i       dB_i += s dy_iᵀ u_i        dA += duᵀ drop(x)       dx += dropᵀ(du A)

The P layers that read the same x (q, k, v; gate, up) are the parts of one adapter. Their A are stacked, (P·r, Cin), so that
x is read once; each part has its own B_i (width, r). A starts uniform in ±1/√Cin and B at 0, as in PEFT.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from ..text.spelling import did_you_mean
from .config import LIMITS, ModelConfig, is_count

GROUPS = {"attention": ("q", "k", "v", "qkv", "proj"), "ffn": ("gate", "up", "down")}
LAYERS = tuple(name for names in GROUPS.values() for name in names)


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Adapters of rank `rank`, scaled by alpha / rank; every other parameter is frozen.

    layers    "all", "attention", "ffn", or names out of q, k, v, qkv, proj, gate, up, down
    dropout   the probability that an adapter drops an entry of its x

    >>> LoraConfig(rank=16, alpha=32).scale
    2.0
    """

    rank: int = 16
    alpha: float = 32.0
    layers: str | tuple[str, ...] = "all"
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def __post_init__(self) -> None:
        def refuse(name: str, accepted: str) -> None:
            raise ValueError(f"lora.{name}: got {getattr(self, name)!r}; accepted: {accepted}")

        if not is_count(self.rank, LIMITS["n_embd"]):
            refuse("rank", f"an int ≥ 1, at most {LIMITS['n_embd']:,}")
        for name in ("alpha", "dropout"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
                refuse(name, "a finite number")
        if self.alpha <= 0:
            refuse("alpha", "a number > 0")
        if not 0.0 <= self.dropout < 1.0:
            refuse("dropout", "a number, 0 ≤ dropout < 1")
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
            refuse("layers", accepted)
        unknown = [name for name in self.layers if name not in LAYERS]
        if unknown:
            raise ValueError(f"lora.layers: got {unknown[0]!r}{did_you_mean(unknown[0], LAYERS)}; accepted: {accepted}")
        if len(set(self.layers)) != len(self.layers):
            refuse("layers", f"each name once, out of {', '.join(LAYERS)}")
        object.__setattr__(self, "layers", tuple(self.layers))


class AdapterParts(NamedTuple):
    """One input of a block, and the adapted layers that read it."""

    name: str  # attn.in, attn.proj, ffn.in, ffn.down
    inputs: int  # channels of x
    widths: dict[str, int]  # by part, in the order of A's rows

    def a_name(self, block: int) -> str:
        """The name of A (P·r, inputs)."""
        return f"blocks.{block}.{self.name}.lora_a"

    def b_name(self, block: int, part: str) -> str:
        """The name of a part's B (width, r)."""
        return f"blocks.{block}.{self.name.split('.')[0]}.{part}.lora_b"


def adapter_parts(config: ModelConfig, lora: LoraConfig) -> tuple[AdapterParts, ...]:
    """The adapters of every block of this model, and their parts. GPT-2's q, k, v are one layer, qkv, as in PEFT.

    >>> import tilegrad
    >>> [(a.name, list(a.widths)) for a in adapter_parts(tilegrad.presets()["llama-135m"].model, LoraConfig(layers="all"))]
    [('attn.in', ['q', 'k', 'v']), ('attn.proj', ['proj']), ('ffn.in', ['gate', 'up']), ('ffn.down', ['down'])]
    """
    c, d = config.n_embd, config.head_dim
    q, kv = config.n_head * d, config.kv_heads * d
    separate = config.position == "rope" or config.qk_norm or config.projection == "per_head"
    ffn = {"gate": config.ffn} if config.activation == "swiglu" else {}
    every = (
        AdapterParts("attn.in", c, {"q": q, "k": kv, "v": kv} if separate else {"qkv": q + 2 * kv}),
        AdapterParts("attn.proj", q, {"proj": c}),
        AdapterParts("ffn.in", c, ffn | {"up": config.ffn}),
        AdapterParts("ffn.down", config.ffn, {"down": c}),
    )
    has = [part for adapter in every for part in adapter.widths]
    if isinstance(lora.layers, tuple):
        chosen = lora.layers
    elif lora.layers in ("all", *GROUPS):
        chosen = tuple(part for part in has if lora.layers == "all" or part in GROUPS[lora.layers])
    else:
        chosen = (lora.layers,)
    for name in chosen:
        if name not in has:
            raise ValueError(f"lora.layers: got {name!r}, which this model does not have; accepted: {', '.join(has)}")
    found = (a._replace(widths={part: width for part, width in a.widths.items() if part in chosen}) for a in every)
    return tuple(a for a in found if a.widths)
