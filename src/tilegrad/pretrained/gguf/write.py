"""`write_gguf`: a model → .gguf, whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...model.config import ModelConfig
from ...text.atomic import check_new, whole_file
from ...text.untrusted import file_in
from ..families import config_json
from . import Outcome
from .architecture import ROPE_TENSOR, metadata_of, places, rope_tensor
from .container import Value, library
from .tokenizer import tokenizer_values

GGML_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}  # dtype → ggml type
_FILE_TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16", "Q8_0": "MOSTLY_Q8_0"}
_KEPT = ("position_embd.weight", ROPE_TENSOR)  # tensors that are float32 in every file, as vectors are


def write_gguf(
    path: Path,
    params: Mapping[str, Tensor],
    config: ModelConfig,
    *,
    origin: Path | None = None,
    tokenizer: Path | None = None,
    dtype: str | None = None,
) -> Outcome:
    """Write a new GGUF file, whole or not at all.

    origin      the folder that the model was imported from
    tokenizer   a tokenizer.json, if `origin` has none; special tokens and the chat template come from `origin`, or without
                `origin` from the folder of this tokenizer.json
    dtype       the dtype of matrices: float32, float16, bfloat16 or q8_0; None: the dtype of `params`. Vectors are float32
    """
    check_new(path)
    first = next(iter(params.values())).dtype
    name = dtype or str(first).removeprefix("torch.")
    if name not in GGML_TYPES:
        raise ValueError(f"dtype: got {name}; accepted: {', '.join(GGML_TYPES)}")
    content = config_json(config, first)
    metadata = metadata_of(content, config)
    own = origin / "tokenizer.json" if origin is not None else None
    source = file_in(own.parent, own.name) if own is not None and own.exists() else tokenizer
    tokenizer_metadata, notes = tokenizer_values(source, origin, config.vocab_size)
    if config.window is not None and config.window < config.block_size:
        notes.append(
            f"llama.cpp has no window in {content['model_type']}: from token {config.window + 1:,} on it attends to more "
            "tokens than the model did"
        )
    tensors = [(place.name, place.shape, place.view) for place in places(str(content["model_type"]), params, config)]
    if config.rope_scaling is not None and config.rope_scaling.kind == "llama3":
        factors = rope_tensor(config.rope_theta, config.head_dim, config.rope_scaling)
        tensors.append((ROPE_TENSOR, tuple(factors.shape), factors))
    notes += _write(path, metadata | tokenizer_metadata, tensors, GGML_TYPES[name])
    return Outcome(str(content["model_type"]), sum(x.numel() for x in params.values()), tuple(notes))


def _write(
    path: Path, values: Mapping[str, Value], tensors: list[tuple[str, tuple[int, ...], Tensor]], dtype: str
) -> list[str]:
    """Write the file with one converted tensor in memory at a time. Returns notes for the user."""
    gguf = library()
    arch = next(iter(values)).split(".")[0]
    kinds = {name: _ggml_type(name, shape, dtype) for name, shape, _ in tensors}
    with whole_file(path) as staged:
        writer = gguf.GGUFWriter(staged, arch)
        try:
            writer.add_type("model")
            writer.add_name(path.stem)
            writer.add_file_type(getattr(gguf.LlamaFileType, _FILE_TYPES[dtype]))
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            for key, value in values.items():
                _add(writer, key, value)
            for name, shape, _ in tensors:
                kind = getattr(gguf.GGMLQuantizationType, kinds[name])
                count, size = gguf.GGML_QUANT_SIZES[kind]
                writer.add_tensor_info(name, shape, np.dtype(np.float32), int(np.prod(shape)) // count * size, kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, shape, view in tensors:
                writer.write_tensor_data(_numbers(gguf, name, shape, view, kinds[name]))
        finally:
            writer.close()
        check_new(path)  # check again, because writing may have taken minutes
    short = sum(kind == "F16" for kind in kinds.values()) if dtype == "Q8_0" else 0
    return [f"{short} matrices are float16, because q8_0 needs rows of a multiple of 32"] if short else []


def _ggml_type(name: str, shape: tuple[int, ...], dtype: str) -> str:
    """The ggml type of a tensor, as llama.cpp's converter chooses it."""
    if len(shape) < 2 or name in _KEPT:
        return "F32"
    return "F16" if dtype == "Q8_0" and shape[-1] % 32 else dtype


def _numbers(gguf: Any, name: str, shape: tuple[int, ...], view: Tensor, kind: str) -> np.ndarray[Any, Any]:
    x = view.detach().to("cpu", torch.float32).reshape(shape)
    if kind == "F16" and float(x.abs().max()) > torch.finfo(torch.float16).max:
        raise ValueError(
            f"{name}: got {float(x.abs().max()):g}; accepted: at most 65504 in float16, or --dtype bfloat16"
        )
    return np.ascontiguousarray(gguf.quants.quantize(x.contiguous().numpy(), getattr(gguf.GGMLQuantizationType, kind)))


def _add(writer: Any, key: str, value: Value) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
