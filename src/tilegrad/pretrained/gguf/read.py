"""`import_gguf`: .gguf → a folder of weights for the engine and transformers."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from ...data.tokenizer import load_tokenizer
from ...model.config import ModelConfig
from ...text.atomic import check_new
from ..families import config_of
from ..weights import allocate, forms, write_weights
from . import Outcome
from .architecture import check_tensors, config_from, places
from .container import Container, open_container
from .tokenizer import tokenizer_files


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the name of the file to an error that lacks it."""
    try:
        yield
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: {error}") from error


def import_gguf(path: Path, out: Path, *, tokenizer: Path | None = None) -> Outcome:
    """Write the model in a GGUF file as a new folder of weights in float32. `tokenizer` is a tokenizer.json to use instead of
    the tokenizer in the file."""
    check_new(out)
    container = open_container(path)
    with _naming(path), tempfile.TemporaryDirectory() as folder:
        content = config_from(container)
        config = config_of(content)
        found = tokenizer_files(container.values)
        files = {name: x for name, x in found.files.items() if tokenizer is None or name != "tokenizer.json"}
        for name, value in {**files, "config.json": {**content, **found.ids}}.items():
            (Path(folder) / name).write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        own = Path(folder) / "tokenizer.json"
        if tokenizer is not None:
            load_tokenizer(tokenizer)
            shutil.copyfile(tokenizer, own)
        elif own.exists():
            _check_tokenizer(own, config)
        params = _read(container, config, str(content["model_type"]))
        write_weights(out, params, config, origin=Path(folder))
    notes = () if tokenizer is not None else found.notes
    return Outcome(str(content["model_type"]), sum(x.numel() for x in params.values()), notes)


def _check_tokenizer(path: Path, config: ModelConfig) -> None:
    try:
        count = load_tokenizer(path).vocab_size
    except ValueError as error:
        reason = str(error).replace(f"{path}: ", "")
        raise ValueError(f"tokenizer.ggml: {reason}; --tokenizer tokenizer.json replaces it") from error
    if count > config.vocab_size:
        raise ValueError(
            f"tokenizer.ggml.tokens: got {count:,}; accepted: at most {config.vocab_size:,}, rows of token_embd"
        )


def _read(container: Container, config: ModelConfig, kind: str) -> dict[str, Tensor]:
    """All weights by their names in tilegrad, in float32. Names and shapes are checked before anything is allocated."""
    without_memory = forms(config)
    check_tensors(container, places(kind, without_memory, config))
    params = allocate(without_memory)
    for place in places(kind, params, config):
        place.view.copy_(container.tensor(place.name).reshape(place.view.shape))
    return params
