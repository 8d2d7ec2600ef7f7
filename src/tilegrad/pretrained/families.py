"""Families of Hugging Face's models: their tensors' names and their config.json, to and from a ModelConfig.

A table gives for each of our tensors those of theirs that it is made of, one above the other; GPT-2's matrices are transposed
(Conv1D). Families: GPT-2, Llama, Mistral, Qwen2, Qwen3. config.json is somebody else's file: each value is asked for with its
type, and null means that it is not given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ..kernels.rope.frequencies import RopeScaling
from ..model.config import LIMITS, ModelConfig
from ..text.untrusted import shown

Config = Mapping[str, object]  # config.json, or a part of it
Names = Mapping[str, tuple[str, ...]]  # ours → theirs, one above the other; {i} is a block, {p} is weight or bias

_ATTENTION = "model.layers.{i}.self_attn."
LLAMA: Names = {
    "wte.{p}": ("model.embed_tokens.{p}",),
    "blocks.{i}.ln1.{p}": ("model.layers.{i}.input_layernorm.{p}",),
    "blocks.{i}.attn.qkv.{p}": tuple(f"{_ATTENTION}{x}_proj.{{p}}" for x in "qkv"),
    **{f"blocks.{{i}}.attn.{x}.{{p}}": (f"{_ATTENTION}{x}_proj.{{p}}",) for x in "qkv"},
    **{f"blocks.{{i}}.attn.{x}_norm.{{p}}": (f"{_ATTENTION}{x}_norm.{{p}}",) for x in "qk"},
    "blocks.{i}.attn.proj.{p}": (f"{_ATTENTION}o_proj.{{p}}",),
    "blocks.{i}.ln2.{p}": ("model.layers.{i}.post_attention_layernorm.{p}",),
    "blocks.{i}.ffn.gate.{p}": ("model.layers.{i}.mlp.gate_proj.{p}",),
    "blocks.{i}.ffn.up.{p}": ("model.layers.{i}.mlp.up_proj.{p}",),
    "blocks.{i}.ffn.down.{p}": ("model.layers.{i}.mlp.down_proj.{p}",),
    "ln_f.{p}": ("model.norm.{p}",),
    "lm_head.{p}": ("lm_head.{p}",),
}
GPT2: Names = {
    "wte.{p}": ("transformer.wte.{p}",),
    "wpe.{p}": ("transformer.wpe.{p}",),
    "blocks.{i}.ln1.{p}": ("transformer.h.{i}.ln_1.{p}",),
    "blocks.{i}.attn.qkv.{p}": ("transformer.h.{i}.attn.c_attn.{p}",),
    "blocks.{i}.attn.proj.{p}": ("transformer.h.{i}.attn.c_proj.{p}",),
    "blocks.{i}.ln2.{p}": ("transformer.h.{i}.ln_2.{p}",),
    "blocks.{i}.ffn.up.{p}": ("transformer.h.{i}.mlp.c_fc.{p}",),
    "blocks.{i}.ffn.down.{p}": ("transformer.h.{i}.mlp.c_proj.{p}",),
    "ln_f.{p}": ("transformer.ln_f.{p}",),
    "lm_head.{p}": ("lm_head.{p}",),
}
FAMILIES: Mapping[str, Names] = {"gpt2": GPT2, "llama": LLAMA, "mistral": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA}
CLASSES = {
    "gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
}  # fmt: skip
_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def theirs(kind: str, tensors: Mapping[str, Tensor], config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Tensors, or gradients, by our names → by theirs, as views."""
    heights = [heads * config.head_dim for heads in (config.n_head, config.kv_heads, config.kv_heads)]
    for ours, x in tensors.items():
        parts = ours.split(".")
        i, p = parts[1] if parts[0] == "blocks" else "", parts[-1]
        pattern = ".".join(["blocks", "{i}", *parts[2:-1], "{p}"] if i else [*parts[:-1], "{p}"])
        names = [name.format(i=i, p=p) for name in FAMILIES[kind][pattern]]
        for name, part in zip(names, x.split(heights) if len(names) > 1 else (x,), strict=True):
            yield name, part.T if kind == "gpt2" and name.endswith(_TRANSPOSED) else part


def _refuse(kind: str, wrong: Mapping[str, tuple[Any, str, bool]]) -> None:
    """`wrong`: name → (got, accepted, good)."""
    bad = [
        f"{name}: got {shown(got)}; accepted: {accepted}" for name, (got, accepted, good) in wrong.items() if not good
    ]
    if bad:
        raise ValueError(f"the engine has no such {kind}: {'; '.join(bad)}")


def config_of(origin: Config) -> ModelConfig:
    """The model that a config.json describes; what the engine has no place for is an error."""
    kind = origin.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"model_type: got {shown(kind)}; accepted: {', '.join(map(repr, FAMILIES))}")
    return _gpt2(origin) if kind == "gpt2" else _llama(origin, kind)


def _value(c: Config, name: str, accepted: str, good: Callable[[object], bool], default: object) -> object:
    """A value by its name; `default` where it is null or not there, and ... where it must be there."""
    value = c.get(name)
    if value is None and default is not ...:
        return default
    if name not in c:
        raise ValueError(f"{name}: got none; accepted: {accepted}")
    if not good(value):
        raise ValueError(f"{name}: got {shown(value)}; accepted: {accepted}")
    return value


def _int(c: Config, name: str, default: object = ...) -> int:
    def whole(x: object) -> bool:
        return isinstance(x, int) and not isinstance(x, bool) and x >= 0

    return cast(int, _value(c, name, "an int ≥ 0", whole, default))


def _maybe_int(c: Config, name: str) -> int | None:
    return _int(c, name) if c.get(name) is not None else None


def _number(c: Config, name: str, default: object = ...) -> float:
    def real(x: object) -> bool:
        return isinstance(x, int | float) and not isinstance(x, bool)

    return cast(float, _value(c, name, "a number", real, default))


def _bool(c: Config, name: str, *, default: bool = False) -> bool:
    return cast(bool, _value(c, name, "true or false", lambda x: isinstance(x, bool), default))


def _layers(c: Config, name: str) -> int:
    """Checked before anything is made for each layer."""
    count = _int(c, name)
    if not 1 <= count <= LIMITS["n_layer"]:
        raise ValueError(f"{name}: got {shown(count)}; accepted: 1 … {LIMITS['n_layer']}")
    return count


def _gpt2(c: Config) -> ModelConfig:
    drops = [_number(c, name, 0.1) for name in ("attn_pdrop", "resid_pdrop", "embd_pdrop")]
    act, scaled, by_layer = (
        c.get("activation_function", "gelu_new"), c.get("scale_attn_weights", True),
        c.get("scale_attn_by_inverse_layer_idx", False),
    )  # fmt: skip
    _refuse(
        "gpt2",
        {
            "activation_function": (act, "'gelu_new'", act in ("gelu_new", "gelu_pytorch_tanh")),
            "attn_pdrop, resid_pdrop, embd_pdrop": (sorted({*drops}), "one dropout for all", len({*drops}) == 1),
            "scale_attn_weights": (scaled, "True", scaled is True),
            "scale_attn_by_inverse_layer_idx": (by_layer, "False", by_layer is False),
            "add_cross_attention": (c.get("add_cross_attention"), "False", not c.get("add_cross_attention")),
            "quantization_config": (c.get("quantization_config"), "none", not c.get("quantization_config")),
        },
    )
    return ModelConfig(
        vocab_size=_int(c, "vocab_size"), block_size=_int(c, "n_positions", 1024), n_layer=_layers(c, "n_layer"),
        n_head=_int(c, "n_head"), n_embd=_int(c, "n_embd"), ffn_dim=_maybe_int(c, "n_inner"),
        norm_eps=_number(c, "layer_norm_epsilon", 1e-5), tie_embeddings=_bool(c, "tie_word_embeddings", default=True),
        dropout=drops[0],
    )  # fmt: skip


def _llama(c: Config, kind: str) -> ModelConfig:
    heads, width, layers = _int(c, "num_attention_heads"), _int(c, "hidden_size"), _layers(c, "num_hidden_layers")
    act, drop, head_dim = c.get("hidden_act", "silu"), c.get("attention_dropout", 0.0), _maybe_int(c, "head_dim")
    block_size = _int(c, "max_position_embeddings", 2048)
    rope = _rope(c)
    scaling, known = _scaling(rope, block_size)
    window, types = _windows(c, kind, layers)
    turned = rope.get("partial_rotary_factor", c.get("partial_rotary_factor", 1.0))
    _refuse(
        kind,
        {
            "hidden_act": (act, "'silu'", act in ("silu", "swish")),
            "attention_dropout": (drop, "0; dropout here is everywhere (--model.dropout)", not drop),
            "rope_parameters": (dict(rope), "the types default, linear, llama3 and yarn, with their usual keys", known),
            "partial_rotary_factor": (turned, "1", turned in (None, 1.0)),
            "layer_types": (sorted({*types}), "full_attention and sliding_attention",
                            {*types} <= {"full_attention", "sliding_attention"}),
            "quantization_config": (c.get("quantization_config"), "none", not c.get("quantization_config")),
        },
    )  # fmt: skip
    bias = _bool(c, "attention_bias")
    sliding = tuple(i for i, name in enumerate(types) if name == "sliding_attention")
    return ModelConfig(
        vocab_size=_int(c, "vocab_size"), block_size=block_size, n_layer=layers, n_head=heads, n_embd=width,
        n_kv_head=_maybe_int(c, "num_key_value_heads") or heads, ffn_dim=_int(c, "intermediate_size"), activation="swiglu",
        norm="rmsnorm", position="rope", bias=False, tie_embeddings=_bool(c, "tie_word_embeddings"),
        window=window if sliding else None, window_layers=None if len(sliding) in (0, layers) else sliding,
        norm_eps=_number(c, "rms_norm_eps", 1e-6),
        rope_theta=float(_number(rope, "rope_theta", _number(c, "rope_theta", 10000.0))),
        rope_scaling=scaling, head_size=None if head_dim is None or head_dim * heads == width else head_dim,
        qk_norm=kind == "qwen3", qkv_bias=True if kind == "qwen2" else bias, proj_bias=kind != "qwen2" and bias,
        ffn_bias=kind == "llama" and _bool(c, "mlp_bias"),
    )  # fmt: skip


def _rope(c: Config) -> Config:
    """rope_parameters, or rope_scaling of older files."""
    for name in ("rope_parameters", "rope_scaling"):
        given = cast(Config, _value(c, name, "an object", lambda x: isinstance(x, Mapping), {}))
        if given:
            return given
    return {}


def _scaling(rope: Config, block_size: int) -> tuple[RopeScaling | None, bool]:
    """(scaling, whether the engine has it)."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    keys = {name for name, value in rope.items() if value is not None}
    keys -= {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    known: dict[object, dict[str, str]] = {  # theirs → ours
        "default": {}, "linear": {"factor": "factor"},
        "llama3": {"factor": "factor", "original_max_position_embeddings": "original", "low_freq_factor": "low",
                   "high_freq_factor": "high"},
        "yarn": {"factor": "factor", "original_max_position_embeddings": "original", "beta_fast": "beta_fast",
                 "beta_slow": "beta_slow", "attention_factor": "attention_factor"},
    }  # fmt: skip
    names = known.get(kind) if isinstance(kind, str) else None
    if names is None or not keys <= {*names} or kind != "default" and "factor" not in keys:
        return None, False
    if kind == "default":
        return None, True
    given: dict[str, Any] = {names[key]: rope[key] for key in keys}  # which RopeScaling checks
    return RopeScaling(cast(Any, kind), **({"original": block_size} if kind == "yarn" else {}) | given), True


def _windows(c: Config, kind: str, layers: int) -> tuple[int | None, list[str]]:
    """(window, each layer's kind of attention)."""
    window = _maybe_int(c, "sliding_window")
    if kind == "llama" or kind.startswith("qwen") and not _bool(c, "use_sliding_window"):
        window = None
    first = _int(c, "max_window_layers", 28) if kind.startswith("qwen") else 0
    usual = ["sliding_attention" if window and i >= first else "full_attention" for i in range(layers)]

    def one_each(x: object) -> bool:
        return isinstance(x, list) and len(x) == layers and all(isinstance(name, str) for name in x)

    return window, cast(list[str], _value(c, "layer_types", f"{layers} names, one for each layer", one_each, usual))


def config_json(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of the family that has this model; an error that names what none has."""
    c = config
    biases = [c.bias if own is None else own for own in (c.qkv_bias, c.proj_bias, c.ffn_bias)]
    shape = {
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": c.tie_embeddings,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if (c.activation, c.norm, c.position) == ("gelu", "layernorm", "learned"):
        _refuse(
            "gpt2 in transformers",
            {
                "bias": (biases, "True", all((c.bias, *biases))),
                "n_kv_head": (c.n_kv_head, "None, or n_head", c.kv_heads == c.n_head),
                "head_size": (c.head_size, "None", c.head_dim * c.n_head == c.n_embd),
                "window": (c.window, "None", c.window is None),
                "qk_norm": (c.qk_norm, "False", not c.qk_norm),
                **_common(c),
            },
        )
        return {
            "architectures": [CLASSES["gpt2"]], "model_type": "gpt2", **shape, "n_positions": c.block_size,
            "n_layer": c.n_layer, "n_head": c.n_head, "n_embd": c.n_embd, "n_inner": c.ffn,
            "activation_function": "gelu_new", "layer_norm_epsilon": c.norm_eps, "attn_pdrop": c.dropout,
            "resid_pdrop": c.dropout, "embd_pdrop": c.dropout,
        }  # fmt: skip
    kind = "qwen3" if c.qk_norm else "qwen2" if biases == [True, False, False] else "mistral" if c.window else "llama"
    allowed = {
        "qwen3": biases[0] == biases[1] and not biases[2],
        "mistral": not any(biases),
        "llama": biases[0] == biases[1],
    }
    everywhere = c.window_layers is None or kind.startswith("qwen")
    _refuse(
        f"{kind} in transformers",
        {
            "activation": (
                c.activation,
                "'swiglu', or 'gelu' with layernorm and learned positions",
                c.activation == "swiglu",
            ),
            "norm": (c.norm, "'rmsnorm'", c.norm == "rmsnorm"),
            "position": (c.position, "'rope'", c.position == "rope"),
            "qkv_bias, proj_bias, ffn_bias": (biases, f"those of {kind}", allowed.get(kind, True)),
            "window_layers": (c.window_layers, "None", everywhere),
            "dropout": (c.dropout, "0", not c.dropout),
            **_common(c),
        },
    )
    s, rope = c.rope_scaling, {"rope_type": "default", "rope_theta": c.rope_theta}
    if s is not None:
        more: dict[str, Any] = {"rope_type": s.kind, "factor": s.factor}
        if s.kind == "llama3":
            more |= {
                "original_max_position_embeddings": s.original,
                "low_freq_factor": s.low,
                "high_freq_factor": s.high,
            }
        elif s.kind == "yarn":
            more |= {"original_max_position_embeddings": s.original, "beta_fast": s.beta_fast, "beta_slow": s.beta_slow}
            more |= {} if s.attention_factor is None else {"attention_factor": s.attention_factor}
        rope |= more
    out = {
        "architectures": [CLASSES[kind]], "model_type": kind, **shape, "max_position_embeddings": c.block_size,
        "num_hidden_layers": c.n_layer, "num_attention_heads": c.n_head, "num_key_value_heads": c.kv_heads,
        "hidden_size": c.n_embd, "head_dim": c.head_dim, "intermediate_size": c.ffn, "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps, "rope_theta": c.rope_theta, "rope_parameters": rope, "sliding_window": c.window,
    }  # fmt: skip
    if kind in ("llama", "qwen3"):
        out |= {"attention_bias": biases[0]}
    if kind == "llama":
        out |= {"mlp_bias": biases[2]}
    if kind.startswith("qwen"):
        names = ["sliding_attention" if c.window_of(i) else "full_attention" for i in range(c.n_layer)]
        out |= {"use_sliding_window": c.window is not None, "max_window_layers": 0, "layer_types": names}
    return out


def _common(c: ModelConfig) -> dict[str, tuple[Any, str, bool]]:
    return {
        "projection": (c.projection, "'dense'", c.projection == "dense"),
        "loss": (c.loss, "'cross_entropy'", c.loss == "cross_entropy"),
    }
