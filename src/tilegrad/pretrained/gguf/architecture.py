"""GGUF's metadata ↔ config.json, and names and layouts of tensors, as llama.cpp's converter writes them.

Architectures: llama (Llama and Mistral), qwen2, qwen3, gpt2. A table maps keys of config.json to keys of GGUF and back.
For llama the rows of q and k are permuted inside each head: row 2i + j of GGUF is row i + j · D/2, because the rope of
llama.cpp rotates neighbours. GPT-2's Conv1D matrices (Cin, Cout) are stored as (Cout, Cin). The scaling of the llama3 rope,
which turns theta^(−2i/D) into frequency[i], is a tensor:

    rope_freqs[i] = theta^(−2i/D) / frequency[i]        i < D/2

An unknown key of the architecture is refused, because it may change what the model computes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...kernels.rope.frequencies import RopeScaling, rope_frequencies
from ...model.config import ModelConfig
from ...text.untrusted import shown
from ..families import CLASSES, Config, theirs
from .container import Container, Scalar, Value, library

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gpt2")
ROPE_TENSOR = "rope_freqs.weight"
_TOLERANCE = 1e-5  # a relative tolerance, because rope_freqs are float32
_LLAMA = {
    "max_position_embeddings": "context_length",
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
}
_GPT2 = {
    "n_positions": "context_length",
    "n_layer": "block_count",
    "n_embd": "embedding_length",
    "n_inner": "feed_forward_length",
    "n_head": "attention.head_count",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
}
_OPTIONAL = ("attention.head_count_kv", "attention.key_length", "rope.freq_base", "attention.sliding_window")
_FACTOR, _ORIGINAL, _PATTERN = (
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "attention.sliding_window_pattern",
)
_YARN = {
    "attention_factor": "rope.scaling.yarn_attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
_LLAMA3 = {
    "factor": "tilegrad.rope_scaling.factor",
    "original_max_position_embeddings": "tilegrad.rope_scaling.original",
    "low_freq_factor": "tilegrad.rope_scaling.low",
    "high_freq_factor": "tilegrad.rope_scaling.high",
}
_MUST_BE: dict[str, tuple[Scalar, ...]] = {  # keys that the engine accepts with one value only
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "rope.scale_linear": (1.0,),
    "pooling_type": (0,),
    "use_parallel_residual": (False,),
}
_UNUSED = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")


def architecture_of(container: Container) -> str:
    arch = container.values.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise ValueError(f"general.architecture: got {shown(arch)}; accepted: {', '.join(map(repr, ARCHITECTURES))}")
    return arch


def config_from(container: Container) -> dict[str, object]:
    """The config.json that the metadata and the names of tensors describe."""
    arch, tensors = architecture_of(container), container.tensors
    own = {
        key.removeprefix(f"{arch}."): _short(value)
        for key, value in container.values.items()
        if key.startswith(f"{arch}.")
    }
    keys = _GPT2 if arch == "gpt2" else _LLAMA
    _check_keys(own, arch, {*keys.values()})
    if "token_embd.weight" not in tensors:
        raise ValueError("missing tensors: ['token_embd.weight']; accepted: the tensors of a whole model, in one file")
    out: dict[str, object] = {ours: own[key] for ours, key in keys.items() if key in own}
    kind = "mistral" if arch == "llama" and "sliding_window" in out else arch
    out |= {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if arch == "gpt2":
        return out | {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    out["rope_parameters"] = {"rope_theta": own.get("rope.freq_base", 10000.0)} | _rope_from(container, own)
    if arch != "qwen2":
        out["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if arch == "llama":
        out["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    if "sliding_window" in out and arch.startswith("qwen"):
        out |= {"use_sliding_window": True, "max_window_layers": 0}
        if isinstance(pattern := own.get(_PATTERN), list):
            out["layer_types"] = ["sliding_attention" if windowed else "full_attention" for windowed in pattern]
    return out


def _short(value: Value) -> Value:
    """The shortest decimal that rounds to the same float32: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _check_keys(own: Mapping[str, Value], arch: str, used: set[str]) -> None:
    """Refuse unknown keys, missing keys, and values that the engine does not support."""
    known = used | {*_UNUSED, *_MUST_BE}
    if arch != "gpt2":
        known |= {_FACTOR, _ORIGINAL, _PATTERN, *_YARN.values(), "rope.scaling.type", "rope.scaling.attn_factor"}
        known |= {"rope.dimension_count", "attention.value_length"}
    if unknown := sorted({*own} - known):
        raise ValueError(f"{arch}.{shown(unknown[0])[1:-1]}: got {shown(own[unknown[0]])}; accepted: no such key")
    if missing := sorted(used - {*own, *_OPTIONAL}):
        raise ValueError(f"{arch}.{missing[0]}: got none; accepted: a number")
    must = dict(_MUST_BE)
    width, heads = own.get("embedding_length"), own.get("attention.head_count")
    if type(width) is int and type(heads) is int and heads:
        size = own.get("attention.key_length", width // heads)
        if not isinstance(size, list):
            must |= dict.fromkeys(("rope.dimension_count", "attention.value_length"), (size,))
    for name, accepted in must.items():
        if name in own and own[name] not in accepted:
            raise ValueError(f"{arch}.{name}: got {shown(own[name])}; accepted: {accepted[0]}")


def _rope_from(container: Container, own: Mapping[str, Value]) -> dict[str, object]:
    """The scaling of rope in the form of config.json."""
    kind = own.get("rope.scaling.type", "linear" if _FACTOR in own else "none")
    if ROPE_TENSOR in container.tensors:
        return _llama3_from(container, own)
    if kind == "none" or kind == "linear" and own.get(_FACTOR, 1.0) == 1:
        return {"rope_type": "default"}
    out: dict[str, object] = {"rope_type": kind, "factor": own.get(_FACTOR)}
    if kind == "yarn":
        named = {"original_max_position_embeddings": _ORIGINAL, **_YARN}
        out |= {ours: own[key] for ours, key in named.items() if key in own}
        relative, factor = own.get("rope.scaling.attn_factor"), own.get(_FACTOR)
        if isinstance(relative, int | float) and isinstance(factor, int | float) and factor >= 1:
            out.setdefault("attention_factor", relative * (0.1 * math.log(factor) + 1.0))
    return out


def _llama3_from(container: Container, own: Mapping[str, Value]) -> dict[str, object]:
    """The llama3 scaling of rope, from the keys that tilegrad's export writes. A missing factor is the largest element of
    ROPE_TENSOR, any other missing number is Llama 3's. ROPE_TENSOR must agree with the scaling."""
    size, theta = own.get("attention.key_length"), own.get("rope.freq_base", 10000.0)
    if size is None and type(width := own.get("embedding_length")) is int:
        heads = own.get("attention.head_count")
        size = width // heads if type(heads) is int and heads else None
    shape = container.tensors[ROPE_TENSOR].shape
    if type(size) is not int or not isinstance(theta, int | float) or shape != (size // 2,):
        raise ValueError(f"{ROPE_TENSOR}: got shape {shape}; accepted: (head_dim / 2,)")
    found = container.tensor(ROPE_TENSOR)
    usual = {"factor": float(found.max()), "original": 8192, "low": 1.0, "high": 4.0}
    given = {name.rpartition(".")[2]: _short(container.values.get(name, 0)) for name in _LLAMA3.values()}
    numbers = {name: given[name] or value for name, value in usual.items()}
    try:
        scaling = RopeScaling("llama3", **numbers)  # type: ignore[arg-type]  # RopeScaling checks them
        same = torch.allclose(found, rope_tensor(float(theta), size, scaling), rtol=_TOLERANCE, atol=0)
    except (ValueError, TypeError, OverflowError, ZeroDivisionError):
        same = False
    if not same:
        raise ValueError(f"{ROPE_TENSOR}: got {shown(found.tolist())}; accepted: the factors of llama3's rope")
    return {"rope_type": "llama3"} | {name: numbers[key.rpartition(".")[2]] for name, key in _LLAMA3.items()}


def rope_tensor(theta: float, size: int, scaling: RopeScaling) -> Tensor:
    plain, _ = rope_frequencies(theta, size, None)
    scaled, _ = rope_frequencies(theta, size, scaling)
    return torch.tensor([a / b for a, b in zip(plain, scaled, strict=True)], dtype=torch.float32)


def metadata_of(content: Config, config: ModelConfig) -> dict[str, Value]:
    """GGUF's keys for a model with this config.json. Raises if llama.cpp does not run the model."""
    arch = _architecture(str(content["model_type"]))
    keys = _GPT2 if arch == "gpt2" else _LLAMA
    out: dict[str, Value] = {"vocab_size": config.vocab_size}
    out |= {key: value for name, key in keys.items() if isinstance(value := content.get(name), int | float)}
    if arch != "gpt2":
        out |= {"rope.dimension_count": config.head_dim, "attention.value_length": config.head_dim}
        out["rope.freq_base"] = float(config.rope_theta)
        if config.window and arch.startswith("qwen"):
            out[_PATTERN] = [config.window_of(i) is not None for i in range(config.n_layer)]
    _check_runs(arch, config)
    vendor: dict[str, Value] = {}
    if (s := config.rope_scaling) is not None and s.kind == "llama3":
        numbers = (float(s.factor), s.original, float(s.low), float(s.high))
        vendor = dict(zip(_LLAMA3.values(), numbers, strict=True))
    elif s is not None:
        out |= {"rope.scaling.type": s.kind, _FACTOR: float(s.factor)}
        if s.kind == "yarn":
            out[_ORIGINAL] = s.original
        if s.attention_factor is not None and s.kind == "yarn":
            out[_YARN["attention_factor"]] = float(s.attention_factor)
            out["rope.scaling.attn_factor"] = s.attention_factor / (0.1 * math.log(s.factor) + 1.0)
    return {f"{arch}.{key}": value for key, value in out.items()} | vendor


def _check_runs(arch: str, c: ModelConfig) -> None:
    """Refuse a model for which llama.cpp's code of this architecture would compute something else."""
    s = c.rope_scaling
    wanted = {
        "rope_scaling.kind": (s and s.kind, "linear or yarn", arch == "llama" or s is None or s.kind != "llama3"),
        "rope_scaling.beta_fast, beta_slow": (
            s and (s.beta_fast, s.beta_slow),
            "32 and 1",
            s is None or s.kind != "yarn" or (s.beta_fast, s.beta_slow) == (32, 1),
        ),
        "head_size": (c.head_size, "None", arch != "qwen2" or c.head_dim * c.n_head == c.n_embd),
        "qkv_bias": (c.qkv_bias, "False", arch != "qwen3" or not (c.bias if c.qkv_bias is None else c.qkv_bias)),
    }
    bad = [f"{name}: got {got}; accepted: {accepted}" for name, (got, accepted, ok) in wanted.items() if not ok]
    if bad:
        raise ValueError(f"llama.cpp does not run this {arch}: {'; '.join(bad)}")


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of tilegrad in GGUF's layout. `view` has its numbers in GGUF's order, but not always in GGUF's `shape`."""

    name: str
    shape: tuple[int, ...]
    view: Tensor


def places(kind: str, params: Mapping[str, Tensor], config: ModelConfig) -> list[Place]:
    """The tensors of tilegrad by their GGUF names. Writing into the views changes `params`."""
    gguf = library()
    table = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, _architecture(kind).upper()), config.n_layer)
    heads = {"q_proj": config.n_head, "k_proj": config.kv_heads} if _architecture(kind) == "llama" else {}
    out = []
    for name, x in theirs(kind, params, config):
        own = str(table.get_name(name, try_suffixes=(".weight", ".bias")))
        layer = name.split(".")[-2]
        if kind == "gpt2" and layer.startswith("c_"):
            out.append(Place(own, tuple(x.T.shape), x.T) if x.ndim == 2 else Place(own, tuple(x.shape), x))
        elif layer in heads:  # rows (heads, 2, D/2) as (heads, D/2, 2)
            out.append(Place(own, tuple(x.shape), x.unflatten(0, (heads[layer], 2, -1)).transpose(1, 2)))
        else:
            out.append(Place(own, tuple(x.shape), x))
    return out


def _architecture(kind: str) -> str:
    return "llama" if kind == "mistral" else kind


def check_tensors(container: Container, wanted: list[Place]) -> None:
    """Refuse a file whose tensors have other names or shapes than `wanted`."""
    names, in_file = {place.name for place in wanted}, {*container.tensors} - {ROPE_TENSOR}
    missing, extra = sorted(names - in_file), sorted(in_file - names)
    if missing or extra:
        raise ValueError(
            f"missing tensors: {missing[:3] or 'none'}; unexpected tensors: {shown(extra[:3]) if extra else 'none'}; "
            "accepted: exactly those that the metadata describes"
        )
    for place in wanted:
        if (got := container.tensors[place.name].shape) != place.shape:
            raise ValueError(f"{place.name}: got shape {shown(got)}; accepted: {place.shape}, by the metadata")
