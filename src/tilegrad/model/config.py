"""The shape of a model; one class describes both GPT-2 and Llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, get_args

from ..kernels.attention.checks import MAX_HEAD_DIM
from ..kernels.checks import is_count, is_number
from ..kernels.rope.frequencies import RopeScaling
from ..text.spelling import did_you_mean
from ..text.untrusted import check_choice, refuse

Activation = Literal["gelu", "tanh", "relu", "relu2", "swiglu"]
Norm = Literal["layernorm", "rmsnorm"]
Position = Literal["learned", "rope"]
Projection = Literal["dense", "per_head"]
Loss = Literal["cross_entropy", "embedding_mse"]
_CHOICES = {"activation": Activation, "norm": Norm, "position": Position, "projection": Projection, "loss": Loss}
LIMITS = {  # several times the sizes of any published model; docs/training.md gives the reasons
    "vocab_size": 1 << 24,
    "block_size": 1 << 24,
    "n_layer": 256,
    "n_head": 1 << 12,
    "n_kv_head": 1 << 12,
    "n_embd": 1 << 17,
    "ffn_dim": 1 << 20,
    "head_size": MAX_HEAD_DIM,
    "window": (1 << 31) - 1,
}
_MAX_THETA = 1e12  # the largest rope_theta; Llama 3 has 5e5


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A pre-norm transformer.

    n_kv_head       None: n_head
    ffn_dim         None: 4 · n_embd
    activation      gelu is the tanh approximation; relu2 is max(x, 0)²
    projection      "per_head": q, k, v of head h read only its own D channels of x
    window          w: a token attends to itself and the w − 1 before it; window_layers=(0, 2): only in these blocks
    head_size       None: n_embd / n_head
    qk_norm         q and k are RMS-normed by head before rope, with weights (D,)
    qkv_bias, proj_bias, ffn_bias   None: bias
    rope_scaling    a RopeScaling, or a mapping of its fields
    logit_softcap   c: the logits l of the head become c · tanh(l / c), in the loss and in generation
    residual_scalars   block i reads a_i x + b_i x0 with learned scalars; x0 is the stream before the first block
    value_embeddings   n: n blocks, every second one from the last on, add s · table[token] to their values, each with its
                    own table (vocab_size, kv_heads · head_dim) and learned scalar s
    embedding_scale   the stream begins with embedding_scale · wte[token]; a tied head reads wte itself

    LIMITS bounds the sizes.

    >>> import tilegrad
    >>> tilegrad.ModelConfig(vocab_size=256, block_size=64, n_layer=2, n_head=4, n_embd=64).ffn
    256
    """

    vocab_size: int
    block_size: int
    n_layer: int
    n_head: int
    n_embd: int
    n_kv_head: int | None = None
    ffn_dim: int | None = None
    activation: Activation = "gelu"
    norm: Norm = "layernorm"
    position: Position = "learned"
    bias: bool = True
    tie_embeddings: bool = True
    projection: Projection = "dense"
    loss: Loss = "cross_entropy"
    window: int | None = None
    dropout: float = 0.0
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    head_size: int | None = None
    qk_norm: bool = False
    qkv_bias: bool | None = None
    proj_bias: bool | None = None
    ffn_bias: bool | None = None
    window_layers: tuple[int, ...] | None = None
    rope_scaling: RopeScaling | None = None
    logit_softcap: float | None = None
    residual_scalars: bool = False
    value_embeddings: int = 0
    embedding_scale: float = 1.0

    @property
    def kv_heads(self) -> int:
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head if self.head_size is None else self.head_size

    def window_of(self, block: int) -> int | None:
        """The window of a block, or None."""
        return self.window if self.window_layers is None or block in self.window_layers else None

    @property
    def ffn(self) -> int:
        return 4 * self.n_embd if self.ffn_dim is None else self.ffn_dim

    @property
    def value_blocks(self) -> range:
        """The blocks with value embeddings, from the last on.

        >>> list(ModelConfig(vocab_size=8, block_size=8, n_layer=6, n_head=1, n_embd=8, value_embeddings=2).value_blocks)
        [5, 3]
        """
        return range(self.n_layer - 1, self.n_layer - 1 - 2 * self.value_embeddings, -2)

    @property
    def softcap(self) -> float:
        """The cap of the logits; 0: none."""
        return self.logit_softcap or 0.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd"):
            if not is_count(getattr(self, name), LIMITS[name]):
                refuse(self, name, f"an int ≥ 1, at most {LIMITS[name]:,}")
        for name in ("n_kv_head", "ffn_dim", "window", "head_size"):
            if getattr(self, name) is not None and not is_count(getattr(self, name), LIMITS[name]):
                refuse(self, name, f"None or an int ≥ 1, at most {LIMITS[name]:,}")
        for name, choices in _CHOICES.items():
            check_choice(self, name, get_args(choices), " or ")
        for name in ("bias", "tie_embeddings", "qk_norm", "residual_scalars"):
            if not isinstance(getattr(self, name), bool):
                refuse(self, name, "True or False")
        for name in ("qkv_bias", "proj_bias", "ffn_bias"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), bool):
                refuse(self, name, "None, True or False")
        most = (self.n_layer + 1) // 2
        if not is_count(self.value_embeddings, most, 0):
            refuse(
                self,
                "value_embeddings",
                f"an int, 0 ≤ value_embeddings ≤ {most}, every second one of {self.n_layer} blocks",
            )
        for name, low, high in (
            ("dropout", 0.0, 1.0),
            ("norm_eps", 1e-30, 1.0),
            ("rope_theta", 1.0, _MAX_THETA),
            ("embedding_scale", 1e-3, 1e6),
        ):
            value = getattr(self, name)
            if not is_number(value) or not low <= value < high:
                refuse(self, name, f"a number, {low:g} ≤ {name} < {high:g}")
        cap = self.logit_softcap
        if cap is not None and not (is_number(cap) and 1e-3 <= cap <= 1e6):
            refuse(self, "logit_softcap", "None, or a number, 0.001 ≤ logit_softcap ≤ 1e+06")
        if self.head_size is None and (self.n_embd % self.n_head or self.head_dim > MAX_HEAD_DIM):
            refuse(self, "n_head", f"a divisor of n_embd ({self.n_embd}) with n_embd / n_head ≤ {MAX_HEAD_DIM}")
        if self.n_head % self.kv_heads:
            refuse(self, "n_kv_head", f"a divisor of n_head ({self.n_head})")
        if self.position == "rope" and self.head_dim % 2:
            refuse(self, "position", f"'learned' where the head dimension ({self.head_dim}) is odd")
        if self.projection == "per_head" and self.kv_heads != self.n_head:
            refuse(self, "n_kv_head", f"None or n_head ({self.n_head}) with projection='per_head'")
        if self.projection == "per_head" and self.head_dim * self.n_head != self.n_embd:
            refuse(
                self, "head_size", f"None or n_embd / n_head ({self.n_embd / self.n_head:g}) with projection='per_head'"
            )
        if self.window_layers is not None:
            layers: object = self.window_layers
            blocks = range(self.n_layer)
            if not isinstance(layers, list | tuple) or not all(type(i) is int and i in blocks for i in layers):
                refuse(self, "window_layers", f"None, or numbers of blocks, 0 … {self.n_layer - 1}")
            object.__setattr__(self, "window_layers", tuple(self.window_layers))
        given: object = self.rope_scaling
        if isinstance(given, Mapping):
            object.__setattr__(self, "rope_scaling", _scaling(given))
        if given is not None and (self.position != "rope" or not isinstance(given, Mapping | RopeScaling)):
            refuse(self, "rope_scaling", "None, or a RopeScaling with position='rope'")
        scaling = self.rope_scaling
        if scaling is not None and scaling.kind == "yarn" and self.rope_theta == 1:
            refuse(self, "rope_theta", "a number > 1 with a rope_scaling of kind 'yarn'")
        if self.loss == "embedding_mse" and not self.tie_embeddings:
            refuse(self, "tie_embeddings", "True with loss='embedding_mse', whose targets are rows of wte")
        if self.loss == "embedding_mse" and cap is not None:
            refuse(self, "logit_softcap", "None with loss='embedding_mse', which has no logits")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """From plain data; an unknown key is an error."""
        names = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(names))
        if unknown:
            meant = did_you_mean(unknown[0], names)
            raise ValueError(
                f"{unknown[0]}: got a key that ModelConfig does not have{meant}; accepted: {', '.join(names)}"
            )
        missing = [field.name for field in fields(cls) if field.default is MISSING and field.name not in values]
        if missing:
            raise ValueError(f"{missing[0]}: got none; accepted: an int ≥ 1, at most {LIMITS[missing[0]]:,}")
        return cls(**values)


def _scaling(values: Mapping[str, Any]) -> RopeScaling:
    names = [field.name for field in fields(RopeScaling)]
    unknown = sorted(set(values) - set(names))
    if unknown or "kind" not in values or "factor" not in values:
        got = f"the key {unknown[0]!r}" if unknown else "no kind or no factor"
        raise ValueError(f"rope_scaling: got {got}; accepted: {', '.join(names)}; kind and factor are required")
    return RopeScaling(**values)


PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(vocab_size=256, block_size=128, n_layer=4, n_head=4, n_embd=128),
    "gpt2": ModelConfig(vocab_size=50257, block_size=1024, n_layer=12, n_head=12, n_embd=768),
    "gpt2-medium": ModelConfig(vocab_size=50257, block_size=1024, n_layer=24, n_head=16, n_embd=1024),
    "gpt2-xl": ModelConfig(vocab_size=50257, block_size=1024, n_layer=48, n_head=25, n_embd=1600),
    "llama-135m": ModelConfig(
        vocab_size=49152,
        block_size=2048,
        n_layer=30,
        n_head=9,
        n_embd=576,
        n_kv_head=3,
        ffn_dim=1536,
        activation="swiglu",
        norm="rmsnorm",
        position="rope",
        bias=False,
    ),
}
