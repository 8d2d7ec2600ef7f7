"""The state that a run saves next to its tensors. Every field is checked when it is read, because a manifest with
the right digest can still have wrong values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from ..data.batches import BatchesState
from ..kernels.checks import is_count, is_number
from ..model.config import LIMITS, ModelConfig
from ..text.untrusted import check_values, shown
from .config import AdapterConfig, Values
from .sections import checked

_MOST = 1 << 62
_MAX_SEED = (1 << 63) - 1
_COUNTERS = ("draws", "steps", "skipped", "skipped_in_a_row")
_DIGEST = re.compile("[0-9a-f]{64}")


class BaseState(TypedDict):
    """The frozen weights of a run with adapters, which are not in its checkpoints."""

    folder: str
    sha256: str  # sha256 of the tensors (`Weights.sha256`)


class RunState(TypedDict):
    engine: dict[str, int]  # seed, draws, steps, skipped, skipped_in_a_row
    data: BatchesState  # the position in the data
    run: dict[str, Values]  # the configuration, by section
    train_loss: float | None  # None: it was not finite
    validation_loss: float | None  # None: there was no evaluation, or it was not finite
    threads: int  # torch's number of threads at the save
    finite: list[Any] | None  # [engine, data, train_loss] before the skipped steps; None: the last step was finite
    tokenizer_sha256: NotRequired[str]  # older checkpoints lack it
    evaluations_since_best: NotRequired[int]  # older checkpoints lack it
    base: NotRequired[BaseState]  # in checkpoints of adapters
    frozen_sha256: NotRequired[str]  # sha256 of the run's own copy of frozen parameters (frozen.py), if it has one
    shapes: NotRequired[dict[str, list[int]]]  # shapes of parameters and moments; only in checkpoints of several ranks
    ranks: NotRequired[int]  # how many ranks wrote the checkpoint; only in checkpoints of several ranks


def check_run_state(state: Mapping[str, object], step: int) -> None:
    """Raise ValueError, with the name of the field, if no run can have saved this state after `step` steps."""
    check_values(state, "state")
    engine, data, run = (_mapping(state.get(name), name) for name in ("engine", "data", "run"))
    _check_engine(engine, "engine")
    _check_data(data, "data")
    model, train, text = (_mapping(run.get(name), f"run.{name}") for name in ("model", "train", "data"))
    for name in ("train_loss", "validation_loss"):
        if name not in state:
            raise ValueError(f"{name}: got none; accepted: a number, or null")
        _check_loss(state[name], name)
    for name in ("tokenizer_sha256", "frozen_sha256"):
        if name in state:
            _check_digest(state[name], name)
    if "evaluations_since_best" in state:
        _count(state["evaluations_since_best"], "evaluations_since_best", 0)
    if state.get("threads") is not None:
        _count(state["threads"], "threads", 1)
    _check_finite(state.get("finite"))
    if engine["steps"] != step:
        raise ValueError(f"engine.steps: got {engine['steps']}; accepted: {step}, the manifest's step")
    try:
        ModelConfig.from_dict(dict(model))
    except ValueError as error:
        raise ValueError(f"run.model: {error}") from error
    if "lora" in run:
        _check_adapters(_mapping(run["lora"], "run.lora"), _mapping(state.get("base"), "base"))
    _check_text(text)
    for name, values in (("engine", engine), ("data", data)):
        if values["seed"] != train.get("seed"):
            raise ValueError(
                f"{name}.seed: got {shown(values['seed'])}; accepted: {shown(train.get('seed'))}, as in run.train"
            )


def adapters_of(run: Mapping[str, Values]) -> AdapterConfig | None:
    """The adapters of a saved configuration, or None."""
    return AdapterConfig(**checked({"lora": run["lora"]}, "lora")["lora"]) if "lora" in run else None


def _check_adapters(lora: Mapping[str, object], base: Mapping[str, object]) -> None:
    try:
        adapters_of({"lora": dict(lora)})
    except ValueError as error:
        raise ValueError(f"run.{error}") from error
    if not isinstance(base.get("folder"), str):
        raise ValueError(f"base.folder: got {shown(base.get('folder'))}; accepted: the name of a folder")
    _check_digest(base.get("sha256"), "base.sha256")


def _check_text(data: Mapping[str, object]) -> None:
    """Check the keys of [data] that are read without a RunConfig; `start.resolve` checks the others."""
    for name, default in (("tokenizer", "bytes"), ("validation", "end")):
        if not isinstance(data.get(name, default), str):
            raise ValueError(f"run.data.{name}: got {shown(data[name])}; accepted: a name")
    fraction = data.get("validation_fraction")
    if not is_number(fraction) or not 0 <= fraction < 1:
        raise ValueError(f"run.data.validation_fraction: got {shown(fraction)}; accepted: at least 0 and less than 1")


def check_shapes(state: Mapping[str, object]) -> dict[str, list[int]]:
    """The shapes of parameters and moments in a checkpoint of several ranks. An older checkpoint has only the shapes of
    parameters; each parameter has the moments m and v, of the same shape."""
    shapes = _mapping(state.get("shapes"), "shapes")
    for name, shape in shapes.items():
        if not isinstance(shape, list) or not all(is_count(size, _MOST, 0) for size in shape):
            raise ValueError(f"shapes: {shown(name)}: got {shown(shape)}; accepted: a list of ints ≥ 0")
    _count(state.get("ranks"), "ranks", 1)
    kinds = ("",) if any(name.startswith("m.") for name in shapes) else ("", "m.", "v.")
    return {f"{kind}{name}": [*x] for name, x in shapes.items() if isinstance(x, list) for kind in kinds}


def _mapping(value: object, name: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: got {shown(value)}; accepted: an object")
    return value


def _count(value: object, name: str, least: int, most: int = _MOST) -> int:
    if is_count(value, most, least):
        return value
    raise ValueError(f"{name}: got {shown(value)}; accepted: an int, {least} … {most}")


def _check_digest(value: object, name: str) -> None:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ValueError(f"{name}: got {shown(value)}; accepted: a sha256, 64 hexadecimal digits")


def _check_loss(value: object, name: str) -> None:
    if value is not None and not is_number(value):
        raise ValueError(f"{name}: got {shown(value)}; accepted: a number, or null")


def _check_engine(engine: Mapping[str, object], name: str) -> None:
    _count(engine.get("seed"), f"{name}.seed", 0, _MAX_SEED)
    _draws, steps, skipped, in_a_row = (_count(engine.get(key), f"{name}.{key}", 0) for key in _COUNTERS)
    if not in_a_row <= skipped <= steps:
        got = f"steps {steps}, skipped {skipped}, skipped_in_a_row {in_a_row}"
        raise ValueError(f"{name}: got {got}; accepted: skipped_in_a_row ≤ skipped ≤ steps")


def _check_data(data: Mapping[str, object], name: str) -> None:
    for counter in ("epoch", "index"):
        _count(data.get(counter), f"{name}.{counter}", 0)
    for counter in {"piece", "tokens_read"} & data.keys():
        _count(data[counter], f"{name}.{counter}", 0)
    _count(data.get("seed"), f"{name}.seed", 0, _MAX_SEED)
    _count(data.get("seq_len"), f"{name}.seq_len", 1, LIMITS["block_size"])
    _check_digest(data.get("tokens_sha256"), f"{name}.tokens_sha256")


def _check_finite(value: object) -> None:
    if value is None:
        return
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError(f"finite: got {shown(value)}; accepted: null, or a list [engine, data, loss]")
    _check_engine(_mapping(value[0], "finite.engine"), "finite.engine")
    _check_data(_mapping(value[1], "finite.data"), "finite.data")
    _check_loss(value[2], "finite.loss")
