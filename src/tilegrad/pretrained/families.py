"""Families of Hugging Face models (GPT-2, Llama, Mistral, Qwen2, Qwen3): names of tensors, and config.json ↔ ModelConfig.

A table maps each tensor of tilegrad to the Hugging Face tensors that are stacked in it. GPT-2's matrices are transposed there
(Conv1D). The type of each value in a config.json is checked, and null counts as missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..kernels.rope.frequencies import RopeScaling
from ..model.config import LIMITS, ModelConfig
from ..text.untrusted import shown

Config = Mapping[str, object]  # config.json, or a part of it
Names = Mapping[str, tuple[str, ...]]  # tilegrad's name → Hugging Face names; {i} is a block, {p} is weight or bias
T = TypeVar("T")

_ATTENTION, _FFN = "model.layers.{i}.self_attn.", "model.layers.{i}.mlp."
LLAMA: Names = {
    "wte.{p}": ("model.embed_tokens.{p}",),
    "blocks.{i}.ln1.{p}": ("model.layers.{i}.input_layernorm.{p}",),
    "blocks.{i}.attn.qkv.{p}": tuple(f"{_ATTENTION}{x}_proj.{{p}}" for x in "qkv"),
    **{f"blocks.{{i}}.attn.{x}.{{p}}": (f"{_ATTENTION}{x}_proj.{{p}}",) for x in "qkv"},
    **{f"blocks.{{i}}.attn.{x}_norm.{{p}}": (f"{_ATTENTION}{x}_norm.{{p}}",) for x in "qk"},
    "blocks.{i}.attn.proj.{p}": (f"{_ATTENTION}o_proj.{{p}}",),
    "blocks.{i}.ln2.{p}": ("model.layers.{i}.post_attention_layernorm.{p}",),
    "blocks.{i}.ffn.up_gate.{p}": tuple(f"{_FFN}{x}_proj.{{p}}" for x in ("up", "gate")),
    **{f"blocks.{{i}}.ffn.{x}.{{p}}": (f"{_FFN}{x}_proj.{{p}}",) for x in ("up", "gate")},
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
_LLAMAS = ("Llama", "Mistral", "Qwen2", "Qwen3")
_ROPE = {"factor": "factor", "original_max_position_embeddings": "original"}
FAMILIES: Mapping[str, Names] = {"gpt2": GPT2, **{name.lower(): LLAMA for name in _LLAMAS}}
CLASSES = {"gpt2": "GPT2LMHeadModel"} | {name.lower(): f"{name}ForCausalLM" for name in _LLAMAS}
_ROPE_KEYS: dict[str, dict[str, str]] = {  # type → Hugging Face key → field of RopeScaling
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {**_ROPE, "low_freq_factor": "low", "high_freq_factor": "high"},
    "yarn": {**_ROPE, **{name: name for name in ("beta_fast", "beta_slow", "attention_factor")}},
}
_LAYER_TYPES = ("full_attention", "sliding_attention")
_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def heights(config: ModelConfig, layer: str) -> list[int]:
    """How many rows of `layer`, qkv or up_gate, belong to each of the Hugging Face layers that are stacked in it."""
    if layer == "up_gate":
        return [config.ffn] * 2
    return [heads * config.head_dim for heads in (config.n_head, config.kv_heads, config.kv_heads)]


def theirs(kind: str, tensors: Mapping[str, Tensor], config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The tensors or gradients of tilegrad under their Hugging Face names, as views."""
    for ours, x in tensors.items():
        parts = ours.split(".")
        i, p = parts[1] if parts[0] == "blocks" else "", parts[-1]
        pattern = ".".join(["blocks", "{i}", *parts[2:-1], "{p}"] if i else [*parts[:-1], "{p}"])
        if pattern not in FAMILIES[kind]:
            raise ValueError(f"{kind}: got a model with {ours}; accepted: one with the layers of {kind}")
        names = [name.format(i=i, p=p) for name in FAMILIES[kind][pattern]]
        for name, part in zip(names, x.split(heights(config, parts[-2])) if len(names) > 1 else (x,), strict=True):
            yield name, part.T if kind == "gpt2" and name.endswith(_TRANSPOSED) else part


Requirement = tuple[object, str, bool]  # got, accepted, whether it is accepted


def _refuse(what: str, requirements: Mapping[str, Requirement]) -> None:
    bad = [
        f"{name}: got {shown(got)}; accepted: {accepted}"
        for name, (got, accepted, ok) in requirements.items()
        if not ok
    ]
    if bad:
        raise ValueError(f"{what}: {'; '.join(bad)}")


def config_of(origin: Config) -> ModelConfig:
    """The model that a config.json describes. Raises if the engine does not support it."""
    kind = origin.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"model_type: got {shown(kind)}; accepted: {', '.join(map(repr, FAMILIES))}")
    return _gpt2(origin) if kind == "gpt2" else _llama(origin, kind)


def _value(c: Config, name: str, kind: type[T], accepted: str, default: T | None) -> T:
    """The value of a key, of type `kind`. If the key is null or missing: `default`, or an error if that is None."""
    value = c.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) == (kind is bool) and isinstance(value, kind):
        return value
    raise ValueError(f"{name}: got {shown(value) if name in c else 'none'}; accepted: {accepted}")


def _int(c: Config, name: str, default: int | None = None) -> int:
    value = _value(c, name, int, "an int ≥ 0", default)
    if value < 0:
        raise ValueError(f"{name}: got {shown(value)}; accepted: an int ≥ 0")
    return value


def _maybe_int(c: Config, name: str) -> int | None:
    return _int(c, name) if c.get(name) is not None else None


def _number(c: Config, name: str, default: float | None = None) -> float:
    if isinstance(value := c.get(name), int) and not isinstance(value, bool):
        return value
    return _value(c, name, float, "a number", default)


def _bool(c: Config, name: str, *, default: bool = False) -> bool:
    return _value(c, name, bool, "true or false", default)


def _layers(c: Config, name: str) -> int:
    """The number of layers, checked before anything is made for each layer."""
    count = _int(c, name)
    if not 1 <= count <= LIMITS["n_layer"]:
        raise ValueError(f"{name}: got {shown(count)}; accepted: 1 … {LIMITS['n_layer']}")
    return count


def _gpt2(c: Config) -> ModelConfig:
    drops = [_number(c, name, 0.1) for name in ("attn_pdrop", "resid_pdrop", "embd_pdrop")]
    act, scaled = c.get("activation_function", "gelu_new"), c.get("scale_attn_weights", True)
    by_layer = c.get("scale_attn_by_inverse_layer_idx", False)
    _refuse(
        "this gpt2 is not supported",
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
        vocab_size=_int(c, "vocab_size"),
        block_size=_int(c, "n_positions", 1024),
        n_layer=_layers(c, "n_layer"),
        n_head=_int(c, "n_head"),
        n_embd=_int(c, "n_embd"),
        ffn_dim=_maybe_int(c, "n_inner"),
        norm_eps=_number(c, "layer_norm_epsilon", 1e-5),
        tie_embeddings=_bool(c, "tie_word_embeddings", default=True),
        dropout=drops[0],
    )


def _llama(c: Config, kind: str) -> ModelConfig:
    heads, width, layers = _int(c, "num_attention_heads"), _int(c, "hidden_size"), _layers(c, "num_hidden_layers")
    act, drop, head_dim = c.get("hidden_act", "silu"), c.get("attention_dropout", 0.0), _maybe_int(c, "head_dim")
    block_size = _int(c, "max_position_embeddings", 2048)
    rope = _rope(c)
    scaling, is_supported = _scaling(rope, block_size)
    window, types = _windows(c, kind, layers)
    rotated = rope.get("partial_rotary_factor", c.get("partial_rotary_factor", 1.0))
    _refuse(
        f"this {kind} is not supported",
        {
            "hidden_act": (act, "'silu'", act in ("silu", "swish")),
            "attention_dropout": (drop, "0; --model.dropout sets it for the whole model", not drop),
            "rope_parameters": (
                dict(rope),
                "the types default, linear, llama3 and yarn, with their usual keys",
                is_supported,
            ),
            "partial_rotary_factor": (rotated, "1", rotated in (None, 1.0)),
            "layer_types": (sorted({*types}), " and ".join(_LAYER_TYPES), {*types} <= {*_LAYER_TYPES}),
            "quantization_config": (c.get("quantization_config"), "none", not c.get("quantization_config")),
        },
    )
    bias = _bool(c, "attention_bias")
    sliding = tuple(i for i, name in enumerate(types) if name == "sliding_attention")
    return ModelConfig(
        vocab_size=_int(c, "vocab_size"),
        block_size=block_size,
        n_layer=layers,
        n_head=heads,
        n_embd=width,
        n_kv_head=_maybe_int(c, "num_key_value_heads") or heads,
        ffn_dim=_int(c, "intermediate_size"),
        activation="swiglu",
        norm="rmsnorm",
        position="rope",
        bias=False,
        tie_embeddings=_bool(c, "tie_word_embeddings"),
        window=window if sliding else None,
        window_layers=None if len(sliding) in (0, layers) else sliding,
        norm_eps=_number(c, "rms_norm_eps", 1e-6),
        rope_theta=float(_number(rope, "rope_theta", _number(c, "rope_theta", 10000.0))),
        rope_scaling=scaling,
        head_size=None if head_dim is None or head_dim * heads == width else head_dim,
        qk_norm=kind == "qwen3",
        qkv_bias=True if kind == "qwen2" else bias,
        proj_bias=kind != "qwen2" and bias,
        ffn_bias=kind == "llama" and _bool(c, "mlp_bias"),
    )


def _rope(c: Config) -> Config:
    """The value of rope_parameters, which older files call rope_scaling."""
    return next(filter(None, (_value(c, n, dict, "an object", {}) for n in ("rope_parameters", "rope_scaling"))), {})


def _scaling(rope: Config, block_size: int) -> tuple[RopeScaling | None, bool]:
    """(scaling, whether the engine supports it)"""
    kind = rope.get("rope_type", rope.get("type", "default"))
    keys = {name for name, value in rope.items() if value is not None}
    keys -= {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    names = _ROPE_KEYS.get(kind) if isinstance(kind, str) else None
    if names is None or not keys <= {*names} or kind != "default" and "factor" not in keys:
        return None, False
    if kind == "default":
        return None, True
    given: dict[str, Any] = {"kind": kind} | {names[key]: rope[key] for key in keys}  # RopeScaling checks them
    return RopeScaling(**({"original": block_size} if kind == "yarn" else {}) | given), True


def _windows(c: Config, kind: str, layers: int) -> tuple[int | None, list[str]]:
    """(window, type of attention of each layer)"""
    window = _maybe_int(c, "sliding_window")
    if kind == "llama" or kind.startswith("qwen") and not _bool(c, "use_sliding_window"):
        window = None
    first = _int(c, "max_window_layers", 28) if kind.startswith("qwen") else 0
    usual = ["sliding_attention" if window and i >= first else "full_attention" for i in range(layers)]
    types = _value(c, "layer_types", list, accepted := f"{layers} names, one for each layer", usual)
    if len(types) != layers or not all(isinstance(name, str) for name in types):
        raise ValueError(f"layer_types: got {shown(types)}; accepted: {accepted}")
    return window, types


def config_json(c: ModelConfig, dtype: torch.dtype) -> dict[str, object]:
    """The config.json of the family to which this model belongs. Raises if no family has such a model."""
    biases = [c.bias if own is None else own for own in (c.qkv_bias, c.proj_bias, c.ffn_bias)]
    is_gpt2 = (c.activation, c.norm, c.position) == ("gelu", "layernorm", "learned")
    kind, own = _gpt2_json(c, biases) if is_gpt2 else _llama_json(c, biases)
    shared = {"vocab_size": c.vocab_size, "tie_word_embeddings": c.tie_embeddings}
    return {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        **shared,
        "dtype": str(dtype).removeprefix("torch."),
        **own,
    }


def _gpt2_json(c: ModelConfig, biases: list[bool]) -> tuple[str, dict[str, object]]:
    requirements: dict[str, Requirement] = {
        "bias": (biases, "True", all((c.bias, *biases))),
        "n_kv_head": (c.n_kv_head, "None, or n_head", c.kv_heads == c.n_head),
        "head_size": (c.head_size, "None", c.head_dim * c.n_head == c.n_embd),
        "window": (c.window, "None", c.window is None),
        "qk_norm": (c.qk_norm, "False", not c.qk_norm),
    }
    _refuse("this model can't be exported as gpt2", requirements | _requirements(c))
    return "gpt2", {
        "n_positions": c.block_size,
        "n_layer": c.n_layer,
        "n_head": c.n_head,
        "n_embd": c.n_embd,
        "n_inner": c.ffn,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": c.norm_eps,
        **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), c.dropout),
    }


def _llama_json(c: ModelConfig, biases: list[bool]) -> tuple[str, dict[str, object]]:
    """(kind, config.json) of a model that is a Llama, Mistral, Qwen2 or Qwen3. Dropout is left out, because these families drop
    other activations, and because it is for training alone."""
    qkv, proj, ffn = biases
    kind = "qwen3" if c.qk_norm else "qwen2" if biases == [True, False, False] else "mistral" if c.window else "llama"
    has_biases = {"qwen3": qkv == proj and not ffn, "qwen2": True, "mistral": not any(biases), "llama": qkv == proj}
    activations = "'swiglu', or 'gelu' with layernorm and learned positions"
    requirements: dict[str, Requirement] = {
        "activation": (c.activation, activations, c.activation == "swiglu"),
        "norm": (c.norm, "'rmsnorm'", c.norm == "rmsnorm"),
        "position": (c.position, "'rope'", c.position == "rope"),
        "qkv_bias, proj_bias, ffn_bias": (biases, f"the biases of {kind}", has_biases[kind]),
        "window_layers": (c.window_layers, "None", c.window_layers is None or kind.startswith("qwen")),
    }
    _refuse(f"this model can't be exported as {kind}", requirements | _requirements(c))
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": c.rope_theta}
    if (s := c.rope_scaling) is not None:
        rope["rope_type"] = s.kind
        values = {theirs: getattr(s, ours) for theirs, ours in _ROPE_KEYS[s.kind].items()}
        rope |= {name: value for name, value in values.items() if value is not None}
    out: dict[str, object] = {
        "max_position_embeddings": c.block_size,
        "num_hidden_layers": c.n_layer,
        "num_attention_heads": c.n_head,
        "num_key_value_heads": c.kv_heads,
        "hidden_size": c.n_embd,
        "head_dim": c.head_dim,
        "intermediate_size": c.ffn,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "rope_parameters": rope,
        "sliding_window": c.window,
    }
    if kind in ("llama", "qwen3"):
        out |= {"attention_bias": qkv}
    if kind == "llama":
        out |= {"mlp_bias": ffn}
    if kind.startswith("qwen"):
        names = ["sliding_attention" if c.window_of(i) else "full_attention" for i in range(c.n_layer)]
        out |= {"use_sliding_window": c.window is not None, "max_window_layers": 0, "layer_types": names}
    return kind, out


def _requirements(c: ModelConfig) -> dict[str, Requirement]:
    return {
        "projection": (c.projection, "'dense'", c.projection == "dense"),
        "loss": (c.loss, "'cross_entropy'", c.loss == "cross_entropy"),
        "logit_softcap": (
            c.logit_softcap,
            "None, because these families have uncapped logits",
            c.logit_softcap is None,
        ),
        "residual_scalars": (c.residual_scalars, "False", not c.residual_scalars),
        "value_embeddings": (c.value_embeddings, "0", not c.value_embeddings),
        "embedding_scale": (c.embedding_scale, "1.0", c.embedding_scale == 1.0),
    }
