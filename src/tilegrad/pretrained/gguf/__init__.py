"""GGUF, the file format of llama.cpp and Ollama: a model in one file, with its tokenizer.

container       the bytes: metadata, the table of tensors, dequantization; every count is checked before it is used
architecture    metadata ↔ config.json, and names and layouts of tensors
tokenizer       metadata ↔ tokenizer.json and tokenizer_config.json
read            .gguf → a folder of weights
write           a model → .gguf

llama.cpp's Python package `gguf` provides block formats, names of tensors and the writer of files.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """A model that was read or written."""

    kind: str  # model_type of config.json
    parameters: int
    notes: tuple[str, ...]
