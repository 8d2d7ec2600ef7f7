"""Weights of Hugging Face folders, in and out: config.json, safetensors, tokenizer.json. transformers is not needed.

    source = open_weights(folder)              config.json as a ModelConfig; what the engine has no place for is an error
    source.load(engine.params)                 every name and shape is checked before the first number is written
    write_weights(folder, params, config)      a folder that transformers loads, whole or not at all

A table gives for each of our tensors those of theirs that it is made of, one above the other; GPT-2's matrices are transposed
(Conv1D). Families: GPT-2, Llama, Mistral, Qwen2, Qwen3. A pickle (.bin, .pt) is never read.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..kernels.rope.frequencies import RopeScaling
from ..model.config import ModelConfig
from ..model.transformer import declare
from .checkpoint import save_tensors
from .data import Tokenizer, load_tokenizer

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
_BUFFERS = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")  # of old checkpoints
_BESIDE = (
    "tokenizer*",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template*",
)


@dataclass(frozen=True, slots=True)
class Weights:
    """A folder of Hugging Face's, not yet read but for its config."""

    folder: Path
    origin: dict[str, Any]  # config.json
    config: ModelConfig
    files: dict[str, Path]  # their name → the file that holds it

    @property
    def tokenizer(self) -> Path | None:
        file = self.folder / "tokenizer.json"
        return file if file.is_file() else None

    def load(self, params: Mapping[str, Tensor]) -> None:
        """Copy into `params`, our names → tensors of any device and dtype, one at a time out of mapped files."""
        config, kind = self.config, self.origin["model_type"]
        wanted = dict(theirs(kind, params, config))
        prefix = FAMILIES[kind]["wte.{p}"][0].split(".")[0] + "."
        there = {name: name if name in self.files else name.removeprefix(prefix) for name in wanted}  # GPT-2's are bare
        missing = sorted(name for name, own in there.items() if own not in self.files)
        known = {*there.values(), *(["lm_head.weight"] if config.tie_embeddings else [])}
        extra = sorted(name for name in self.files if name not in known and not name.endswith(_BUFFERS))
        if missing or extra:
            raise ValueError(
                f"{self.folder}: got no tensors {missing[:3] or 'missing'}, and {extra[:3] or 'none'} beyond the model's; "
                "accepted: those of config.json"
            )
        with ExitStack() as stack:
            opened = {file: stack.enter_context(safe_open(file, framework="pt")) for file in {*self.files.values()}}
            for name, place in wanted.items():
                shape = tuple(opened[self.files[there[name]]].get_slice(there[name]).get_shape())
                if shape != tuple(place.shape):
                    raise ValueError(
                        f"{self.folder}: {there[name]}: got shape {shape}; accepted: {tuple(place.shape)}, by config.json"
                    )
            for name, place in wanted.items():
                place.copy_(opened[self.files[there[name]]].get_tensor(there[name]))

    def begin(self, params: Mapping[str, Tensor], origin: Path) -> None:
        """The weights of a run that begins with these; `origin` keeps what an export gives back beside them."""
        self.load(params)
        self.keep_origin(origin)

    def keep_origin(self, origin: Path) -> None:
        origin.mkdir(parents=True, exist_ok=True)
        (origin / "config.json").write_text(json.dumps(self.origin, indent=2) + "\n", encoding="utf-8")
        copy_beside(self.folder, origin)

    def read(self) -> dict[str, Tensor]:
        """All of them, by our names, in float32."""
        shapes = declare(self.config, 1, 1, torch.float32, "cpu").params
        params = {name: torch.empty(tuple(p.master.shape)) for name, p in shapes.items()}
        self.load(params)
        return params


def is_weights(folder: Path) -> bool:
    """A folder of Hugging Face's, or a file of weights: not a run's."""
    return folder.is_file() or (folder / "config.json").is_file()


def imported(folder: Path) -> tuple[ModelConfig, dict[str, Tensor], Tokenizer]:
    """A model to generate with: its config, its weights and its tokenizer."""
    source = open_weights(folder)
    if source.tokenizer is None:
        raise FileNotFoundError(
            f"{source.folder / 'tokenizer.json'}: no such file; accepted: weights with their tokenizer"
        )
    return source.config, source.read(), load_tokenizer(source.tokenizer)


def open_weights(source: Path) -> Weights:
    """A folder with config.json and *.safetensors, or one such file beside its config.json."""
    folder = source.parent if source.is_file() else source
    if source.is_file() and source.suffix != ".safetensors":
        raise ValueError(
            f"{source}: got {source.suffix or 'no suffix'}; accepted: .safetensors; a pickle is never read"
        )
    path = folder / "config.json"
    if not source.exists():
        raise FileNotFoundError(
            f"{source}: no such folder or file; accepted: a folder with config.json and *.safetensors"
        )
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; accepted: a folder with config.json and *.safetensors")
    try:
        origin = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: is not JSON: {error}") from error
    kind: Any = origin.get("model_type") if isinstance(origin, dict) else None
    if kind not in FAMILIES:
        raise ValueError(f"{path}: model_type: got {kind!r}; accepted: {', '.join(map(repr, FAMILIES))}")
    try:
        config = _gpt2(origin) if kind == "gpt2" else _llama(origin, kind)
    except KeyError as error:
        raise ValueError(f"{path}: got no {error}; accepted: a whole {kind}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return Weights(folder, origin, config, _files(folder, source if source.is_file() else None))


def _files(folder: Path, one: Path | None) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if one is None and index.is_file():
        files = {
            name: folder / file for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()
        }
        gone = sorted({str(file) for file in files.values() if not file.is_file()})
        if gone:
            raise FileNotFoundError(f"{gone[0]}: no such file, and {index.name} names it")
        return files
    file = one or folder / "model.safetensors"
    if not file.is_file():
        pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
        hint = f" ({pickles[0]} is a pickle, which is never read: save_pretrained of transformers writes safetensors)"
        raise FileNotFoundError(f"{file}: no such file{hint if pickles else ''}")
    with safe_open(file, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), file)


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
    bad = [f"{name}: got {got!r}; accepted: {accepted}" for name, (got, accepted, good) in wrong.items() if not good]
    if bad:
        raise ValueError(f"the engine has no such {kind}: {'; '.join(bad)}")


def _gpt2(c: Mapping[str, Any]) -> ModelConfig:
    drops = {c.get(name, 0.1) for name in ("attn_pdrop", "resid_pdrop", "embd_pdrop")}
    act, scaled, by_layer = (
        c.get("activation_function", "gelu_new"), c.get("scale_attn_weights", True),
        c.get("scale_attn_by_inverse_layer_idx", False),
    )  # fmt: skip
    _refuse(
        "gpt2",
        {
            "activation_function": (act, "'gelu_new'", act in ("gelu_new", "gelu_pytorch_tanh")),
            "attn_pdrop, resid_pdrop, embd_pdrop": (sorted(drops), "one dropout for all", len(drops) == 1),
            "scale_attn_weights": (scaled, "True", scaled is True),
            "scale_attn_by_inverse_layer_idx": (by_layer, "False", by_layer is False),
            "add_cross_attention": (c.get("add_cross_attention"), "False", not c.get("add_cross_attention")),
            "quantization_config": (c.get("quantization_config"), "none", not c.get("quantization_config")),
        },
    )
    return ModelConfig(
        vocab_size=c["vocab_size"], block_size=c.get("n_positions", 1024), n_layer=c["n_layer"], n_head=c["n_head"],
        n_embd=c["n_embd"], ffn_dim=c.get("n_inner"), norm_eps=c.get("layer_norm_epsilon", 1e-5),
        tie_embeddings=c.get("tie_word_embeddings", True), dropout=drops.pop(),
    )  # fmt: skip


def _llama(c: Mapping[str, Any], kind: str) -> ModelConfig:
    heads, width, layers = c["num_attention_heads"], c["hidden_size"], c["num_hidden_layers"]
    act, drop, head_dim = c.get("hidden_act", "silu"), c.get("attention_dropout", 0.0), c.get("head_dim")
    block_size = c.get("max_position_embeddings", 2048)
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    scaling, known = _scaling(rope, block_size)
    window, types = _windows(c, kind)
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
    bias = c.get("attention_bias", False)
    sliding = tuple(i for i, name in enumerate(types) if name == "sliding_attention")
    return ModelConfig(
        vocab_size=c["vocab_size"], block_size=block_size, n_layer=layers, n_head=heads, n_embd=width,
        n_kv_head=c.get("num_key_value_heads") or heads, ffn_dim=c["intermediate_size"], activation="swiglu", norm="rmsnorm",
        position="rope", bias=False, tie_embeddings=c.get("tie_word_embeddings", False),
        window=window if sliding else None, window_layers=None if len(sliding) in (0, layers) else sliding,
        norm_eps=c.get("rms_norm_eps", 1e-6), rope_theta=float(rope.get("rope_theta", c.get("rope_theta", 10000.0))),
        rope_scaling=scaling, head_size=None if head_dim is None or head_dim * heads == width else head_dim,
        qk_norm=kind == "qwen3", qkv_bias=True if kind == "qwen2" else bias, proj_bias=kind != "qwen2" and bias,
        ffn_bias=kind == "llama" and c.get("mlp_bias", False),
    )  # fmt: skip


def _scaling(rope: Mapping[str, Any], block_size: int) -> tuple[RopeScaling | None, bool]:
    """(scaling, whether the engine has it)."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    keys = {name for name, value in rope.items() if value is not None}
    keys -= {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    names = {  # theirs → ours
        "default": {}, "linear": {"factor": "factor"},
        "llama3": {"factor": "factor", "original_max_position_embeddings": "original", "low_freq_factor": "low",
                   "high_freq_factor": "high"},
        "yarn": {"factor": "factor", "original_max_position_embeddings": "original", "beta_fast": "beta_fast",
                 "beta_slow": "beta_slow", "attention_factor": "attention_factor"},
    }.get(kind)  # fmt: skip
    if names is None or not keys <= {*names} or kind != "default" and "factor" not in keys:
        return None, False
    if kind == "default":
        return None, True
    given = {names[key]: rope[key] for key in keys}
    return RopeScaling(kind, **({"original": block_size} if kind == "yarn" else {}) | given), True


def _windows(c: Mapping[str, Any], kind: str) -> tuple[int | None, list[str]]:
    """(window, each layer's kind of attention)."""
    layers, window, types = c["num_hidden_layers"], c.get("sliding_window"), c.get("layer_types")
    if kind == "llama" or kind.startswith("qwen") and not c.get("use_sliding_window", False):
        window = None
    if types is None:
        first = c.get("max_window_layers", 28) if kind.startswith("qwen") else 0
        types = ["sliding_attention" if window and i >= first else "full_attention" for i in range(layers)]
    return window, list(types)


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


def write_weights(
    folder: Path, params: Mapping[str, Tensor], config: ModelConfig, *, origin: Path | None = None,
    tokenizer: Path | None = None, dtype: torch.dtype | None = None, max_shard_bytes: int | None = None,
) -> None:  # fmt: skip
    """A folder that transformers loads, which must not be there. `origin`: the folder that the model was imported from, whose
    config.json and tokenizer go along where they are still this model's; `tokenizer`: a tokenizer.json where there is none.
    Files hold at most `max_shard_bytes`, or one tensor that is larger; None is one file."""
    if folder.exists():
        raise ValueError(f"{folder}: got a folder that is there already; accepted: a new name")
    kept = dtype or next(iter(params.values())).dtype
    content = config_json(config, kept) if origin is None else _same_config(origin, config, kept)
    kind = content["model_type"]
    staged = folder.with_name(f".{folder.name}.partial")
    if staged.exists():
        raise ValueError(
            f"{folder}: got {staged} next to it, which may be what a killed process left; accepted: a new name, or this one "
            "after that folder is deleted"
        )
    staged.mkdir(parents=True)
    try:
        _save(staged, dict(theirs(kind, params, config)), kept, max_shard_bytes)
        (staged / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        if origin is not None:
            copy_beside(origin, staged)
        if tokenizer is not None and not (staged / "tokenizer.json").exists():
            shutil.copyfile(tokenizer, staged / "tokenizer.json")
        staged.rename(folder)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def _save(folder: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype, most: int | None) -> None:
    """model.safetensors, or model-00001-of-0000n.safetensors … with an index, one shard in memory at a time."""
    shards: list[list[str]] = [[]]
    room = most
    for name, x in tensors.items():
        size = x.numel() * dtype.itemsize
        if room is not None and size > room and shards[-1]:
            shards.append([])
            room = most
        shards[-1].append(name)
        room = None if room is None else room - size
    n = len(shards)
    files = ["model.safetensors"] if n == 1 else [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
    for file, names in zip(files, shards, strict=True):
        shard = {name: tensors[name].detach().to("cpu", dtype).contiguous() for name in names}
        save_tensors(shard, folder / file, {"format": "pt"})
    if n > 1:
        total = sum(x.numel() for x in tensors.values()) * dtype.itemsize
        where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _same_config(origin: Path, config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The origin's config.json with this dtype, where it is this model's but for the context and dropout; else one of ours."""
    content = json.loads((origin / "config.json").read_text(encoding="utf-8"))
    own = _gpt2(content) if content["model_type"] == "gpt2" else _llama(content, content["model_type"])
    if replace(own, block_size=config.block_size, dropout=config.dropout) != config:
        return config_json(config, dtype)
    content.pop("torch_dtype", None)
    return {**content, "dtype": str(dtype).removeprefix("torch.")}


def copy_beside(source: Path, target: Path) -> None:
    """Tokenizer files, generation_config.json and chat templates."""
    for path in sorted({path for pattern in _BESIDE for path in source.glob(pattern) if path.is_file()}):
        shutil.copyfile(path, target / path.name)
