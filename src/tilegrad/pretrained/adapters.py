"""Low-rank adapters (model/lora.py) as PEFT saves them: adapter_model.safetensors and adapter_config.json. PEFT is not needed.

    adapter = open_adapter(folder, source)      reads rank, alpha and layers; raises if the engine does not support them
    adapter.load(params)                        checks every name, shape and dtype before it writes a parameter
    write_adapter(folder, params, …)            writes a folder that PEFT loads, whole or not at all
    merge(params, adapters, …)                  W += s B A, for a model without adapters

PEFT has an A for each adapted layer. In tilegrad the matrices A of all layers with the same input are stacked in one tensor.
Files are opened by the rules of text/untrusted.py.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.checks import is_count, is_number
from ..model.config import ModelConfig
from ..model.lora import GROUPS, LoraConfig, adapter_parts
from ..text.atomic import save_tensors
from ..text.untrusted import file_in, naming, open_tensors, read_json, shown
from .families import FAMILIES, heights
from .weights import STORED_DTYPES, Weights, new_folder

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_KEY = re.compile(rf"{re.escape(_PREFIX)}(.+)\.lora_([AB])\.weight")
_IGNORED = {  # options of PEFT that do not change what the adapters compute
    *("auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "exclude_modules", "fan_in_fan_out"),
    *("inference_mode", "layers_pattern", "megatron_core", "peft_version", "qalora_group_size", "revision"),
    "target_modules",
}
_INITS = (True, False, "gaussian", "orthogonal", "eva")  # the values of init_lora_weights that keep the base weights
_NEUTRAL: tuple[object, ...] = (None, False, {}, [])  # an option with this value is not used


class Place(NamedTuple):
    """An A or B named `theirs` in PEFT's file, and the rows that it fills of the tensor named `ours` in tilegrad."""

    theirs: str
    ours: str
    rows: slice


def places(kind: str, config: ModelConfig, lora: LoraConfig) -> Iterator[Place]:
    """The A and B of every adapted layer, with their names in PEFT and in tilegrad."""
    for i in range(config.n_layer):
        for adapter in adapter_parts(config, lora):
            for n, part in enumerate(adapter.widths):
                name = f"{_PREFIX}{_module(kind, part, i)}"
                rows = slice(n * lora.rank, (n + 1) * lora.rank)
                yield Place(f"{name}.lora_A.weight", adapter.a_name(i), rows)
                yield Place(f"{name}.lora_B.weight", adapter.b_name(i, part), slice(None))


def adapter_shapes(config: ModelConfig, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every adapter, by its name in tilegrad."""
    found: dict[str, tuple[int, ...]] = {}
    for i in range(config.n_layer):
        for adapter in adapter_parts(config, lora):
            found[adapter.a_name(i)] = (len(adapter.widths) * lora.rank, adapter.inputs)
            found |= {adapter.b_name(i, part): (width, lora.rank) for part, width in adapter.widths.items()}
    return found


def merge(params: Mapping[str, Tensor], adapters: Mapping[str, Tensor], config: ModelConfig, lora: LoraConfig) -> None:
    """W += s B A, in place in `params`: computed in float64 and rounded once to the dtype of W."""
    for i in range(config.n_layer):
        for adapter in adapter_parts(config, lora):
            stacked = adapters[adapter.a_name(i)].split(lora.rank)
            for a, (part, width) in zip(stacked, adapter.widths.items(), strict=True):
                w = _weight(params, config, f"blocks.{i}.{adapter.name.split('.')[0]}", part)
                b = adapters[adapter.b_name(i, part)]
                w.copy_(torch.addmm(w.double(), b.double(), a.double(), alpha=lora.scale))
                assert w.shape[0] == width


def _weight(params: Mapping[str, Tensor], config: ModelConfig, branch: str, part: str) -> Tensor:
    """The weight (width, Cin) of a part: a parameter, or rows of the parameter qkv or up_gate."""
    if f"{branch}.{part}.weight" in params:
        return params[f"{branch}.{part}.weight"]
    layer, parts = ("qkv", tuple("qkv")) if part in "qkv" else ("up_gate", ("up", "gate"))
    rows: dict[str, Tensor] = dict(
        zip(parts, params[f"{branch}.{layer}.weight"].split(heights(config, layer)), strict=True)
    )
    return rows[part]


def _module(kind: str, part: str, block: int) -> str:
    """The name of a linear layer in transformers, such as model.layers.0.self_attn.q_proj."""
    branch = "attn" if part in GROUPS["attention"] else "ffn"
    (name,) = FAMILIES[kind][f"blocks.{{i}}.{branch}.{part}.{{p}}"]
    return name.format(i=block, p="weight").removesuffix(".weight")


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A folder with adapters of PEFT. Its configuration and the names of its tensors have been read, its tensors have not."""

    file: Path
    kind: str  # family of the base weights
    config: ModelConfig
    lora: LoraConfig

    def load(self, params: Mapping[str, Tensor]) -> None:
        """Copy the file into the adapters among `params` (names in tilegrad → tensors of any device and dtype)."""
        self.check(params)
        with open_tensors(self.file) as opened:
            for place in places(self.kind, self.config, self.lora):
                params[place.ours][place.rows].copy_(opened.get_tensor(place.theirs))

    def check(self, params: Mapping[str, Tensor]) -> None:
        """Refuse a file whose shapes differ from `params`, or with a dtype that is not in STORED_DTYPES."""
        with open_tensors(self.file) as opened:
            for place in places(self.kind, self.config, self.lora):
                found, accepted = opened.get_slice(place.theirs), tuple(params[place.ours][place.rows].shape)
                shape, dtype = tuple(found.get_shape()), found.get_dtype()
                if shape != accepted:
                    raise ValueError(
                        f"{self.file}: {place.theirs}: got shape {shape}; accepted: {accepted}, by {CONFIG} and the base "
                        "weights"
                    )
                if dtype not in STORED_DTYPES:
                    raise ValueError(
                        f"{self.file}: {place.theirs}: got dtype {dtype}; accepted: {', '.join(STORED_DTYPES)}"
                    )

    def read(self) -> dict[str, Tensor]:
        """All adapters by their names in tilegrad, in float32. Names, shapes and dtypes are checked before anything is
        allocated."""
        shapes = adapter_shapes(self.config, self.lora)
        self.check({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
        params = {name: torch.empty(shape) for name, shape in shapes.items()}
        self.load(params)
        return params


def open_adapter(folder: Path, base: Weights) -> AdapterFile:
    """PEFT's adapters for these base weights. Raises for options that change what the adapters compute, and names them."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; accepted: a folder with {CONFIG} and {TENSORS}")
    path = file_in(folder, CONFIG)
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: got {shown(content)}; accepted: an object")
    with naming(path):
        rank, alpha, dropout = _settings(content)
    if not (folder / TENSORS).exists() and (folder / "adapter_model.bin").exists():
        raise FileNotFoundError(
            f"{folder / TENSORS}: no such file (adapter_model.bin is a pickle, which is never read: save_pretrained of a "
            "recent PEFT writes safetensors)"
        )
    file = file_in(folder, TENSORS)
    with open_tensors(file) as opened:
        names = {*opened.keys()}
    layers = _layers(file, names, base)
    with naming(path):
        lora = LoraConfig(rank, alpha, layers, dropout)
    return AdapterFile(file, base.kind, base.config, lora)


def _settings(content: Mapping[str, object]) -> tuple[int, float, float]:
    """(rank, alpha, dropout) of an adapter_config.json. In tilegrad the scale s is alpha / r. In PEFT with use_rslora it is
    lora_alpha / √r, so alpha is then lora_alpha · √r."""
    unused = {"bias": ("none",), "task_type": (None, "CAUSAL_LM"), "init_lora_weights": _INITS, "peft_type": ("LORA",)}
    read = {"r", "lora_alpha", "lora_dropout", "use_rslora"}
    for name, value in content.items():
        accepted = unused.get(name, _NEUTRAL)
        if name not in _IGNORED | read and not any(value is one or value == one for one in accepted):
            choices = " or ".join(json.dumps(one) for one in accepted)
            raise ValueError(f"{name}: got {shown(value)}; accepted: {choices}; the engine has no other")
    if content.get("peft_type") != "LORA":
        raise ValueError(f"peft_type: got {shown(content.get('peft_type'))}; accepted: 'LORA'")
    rank, alpha, dropout = content.get("r"), content.get("lora_alpha"), content.get("lora_dropout", 0.0)
    if not is_count(rank):
        raise ValueError(f"r: got {shown(rank)}; accepted: an int ≥ 1")
    if not is_number(alpha) or not 0 < alpha < math.inf:
        raise ValueError(f"lora_alpha: got {shown(alpha)}; accepted: a number > 0")
    if not is_number(dropout) or not 0 <= dropout < 1:
        raise ValueError(f"lora_dropout: got {shown(dropout)}; accepted: a number, 0 ≤ lora_dropout < 1")
    use_rslora = content.get("use_rslora", False)
    if not isinstance(use_rslora, bool):
        raise ValueError(f"use_rslora: got {shown(use_rslora)}; accepted: true or false")
    return rank, float(alpha) * (math.sqrt(rank) if use_rslora else 1.0), float(dropout)


def _layers(file: Path, names: set[str], base: Weights) -> str | tuple[str, ...]:
    """The layers that the tensors adapt, which must be the same in every block."""
    parts = [part for adapter in adapter_parts(base.config, LoraConfig()) for part in adapter.widths]
    part_of = {_module(base.kind, part, i): part for i in range(base.config.n_layer) for part in parts}
    found: set[str] = set()
    for name in sorted(names):
        match = _KEY.fullmatch(name)
        if match is None or match[1] not in part_of:
            example = _PREFIX + _module(base.kind, parts[0], 0)
            raise ValueError(
                f"{file}: got {shown(name)}, which {base.folder} has no adapter for; accepted: lora_A.weight and "
                f"lora_B.weight of {', '.join(parts)} in {base.config.n_layer} blocks, such as {example}.lora_A.weight"
            )
        found.add(part_of[match[1]])
    if not found:
        raise ValueError(f"{file}: got no tensor; accepted: the adapters of at least one layer")
    layers = tuple(part for part in parts if part in found)
    wanted = {place.theirs for place in places(base.kind, base.config, LoraConfig(layers=layers))}
    if missing := sorted(wanted - names):
        raise ValueError(
            f"{file}: missing tensors: {missing[:3]}; accepted: the same layers in all {base.config.n_layer} blocks"
        )
    if layers == (*parts,):
        return "all"
    groups = (name for name, members in GROUPS.items() if layers == tuple(part for part in parts if part in members))
    return next(groups, layers)


def adapter_json(kind: str, config: ModelConfig, lora: LoraConfig, base: str) -> dict[str, object]:
    """The content of adapter_config.json, with the keys that PEFT writes."""
    return {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": kind == "gpt2",  # because the linear layers of GPT-2 are Conv1D
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": _targets(kind, config, lora),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def _targets(kind: str, config: ModelConfig, lora: LoraConfig) -> list[str]:
    """target_modules: the last part of the name of each adapted module. GPT-2 has two modules named c_proj in a block; if only
    one of them is adapted, the name of its parent is included."""
    chosen = [part for adapter in adapter_parts(config, lora) for part in adapter.widths]
    parts = [part for adapter in adapter_parts(config, LoraConfig()) for part in adapter.widths]
    ends = {part: _module(kind, part, 0).split(".")[-2:] for part in parts}
    others = {ends[part][1] for part in parts if part not in chosen}
    return sorted({".".join(ends[part]) if ends[part][1] in others else ends[part][1] for part in chosen})


def write_adapter(
    folder: Path,
    adapters: Mapping[str, Tensor],
    config: ModelConfig,
    lora: LoraConfig,
    *,
    kind: str,
    base: str,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a new folder that PEFT loads. `base` is the name of the base weights, `kind` their family."""
    with new_folder(folder) as staged:
        tensors = {
            place.theirs: adapters[place.ours][place.rows].detach().to("cpu", dtype).contiguous()
            for place in places(kind, config, lora)
        }
        save_tensors(dict(sorted(tensors.items())), staged / TENSORS, {"format": "pt"})
        content = json.dumps(adapter_json(kind, config, lora, base), indent=2)
        (staged / CONFIG).write_text(content + "\n", encoding="utf-8")
