"""What a run's checkpoint says next to its tensors, checked field by field when it is read: a digest says that a manifest is
what somebody wrote, not that it is true. Readers behind `checkpoint.read_state` rely on every type and range here.

engine             seed, draws, steps, skipped, skipped_in_a_row
data               epoch and index of the next window, and what their order depends on: seed, seq_len, tokens_sha256
run                the configuration, sections model, train and data
train_loss         a number, or None where it was not finite; so is validation_loss, also None where there was no evaluation
tokenizer_sha256   of the tokenizer that made the tokens; older checkpoints lack it
finite             amid steps that are not finite: engine, data and train_loss of before them; else None
threads            torch's, when it was saved
shapes, ranks      of shards alone: the shape of every parameter, and how many ranks wrote
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..model.config import LIMITS, ModelConfig, is_count
from ..text.untrusted import check_values, shown

State = dict[str, Any]  # as the table above has it
_MOST = 1 << 62
_MAX_SEED = (1 << 63) - 1
_COUNTERS = ("draws", "steps", "skipped", "skipped_in_a_row")
_DIGEST = re.compile("[0-9a-f]{64}")


def check_run_state(state: Mapping[str, object], step: int) -> None:
    """Refuse, with the field's name, what no run saves after `step` steps."""
    check_values(state, "state")
    engine = _engine(state.get("engine"), "engine")
    _data(state.get("data"), "data")
    run = _mapping(state.get("run"), "run")
    for name in ("model", "train", "data"):
        _mapping(run.get(name), f"run.{name}")
    for name in ("train_loss", "validation_loss"):
        if name not in state:
            raise ValueError(f"{name}: got none; accepted: a number, or null")
        _loss(state[name], name)
    if "tokenizer_sha256" in state:
        _digest(state["tokenizer_sha256"], "tokenizer_sha256")
    if state.get("threads") is not None:
        _count(state["threads"], "threads", 1)
    _finite(state.get("finite"))
    if engine["steps"] != step:
        raise ValueError(f"engine.steps: got {engine['steps']}; accepted: {step}, the manifest's step")
    _run(run)
    for name in ("engine", "data"):
        if _mapping(state[name], name)["seed"] != run["train"].get("seed"):
            raise ValueError(
                f"{name}.seed: got {shown(state[name])}; accepted: {shown(run['train'].get('seed'))}, the run's"
            )


def _run(run: Mapping[str, Any]) -> None:
    """The model, and of the rest what is read without a RunConfig, which `folder.own_run` makes of all of it."""
    try:
        ModelConfig.from_dict(dict(run["model"]))
    except ValueError as error:
        raise ValueError(f"run.model: {error}") from error
    data = run["data"]
    for name, usual in (("tokenizer", "bytes"), ("validation", "end")):
        if not isinstance(data.get(name, usual), str):
            raise ValueError(f"run.data.{name}: got {shown(data[name])}; accepted: a name")
    fraction = data.get("validation_fraction")
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction < 1:
        raise ValueError(f"run.data.validation_fraction: got {shown(fraction)}; accepted: at least 0 and less than 1")


def check_shapes(state: Mapping[str, object]) -> dict[str, list[int]]:
    """The shapes of the parameters whose shards a checkpoint holds."""
    shapes = _mapping(state.get("shapes"), "shapes")
    for name, shape in shapes.items():
        if not isinstance(shape, list) or not all(is_count(size, _MOST, 0) for size in shape):
            raise ValueError(f"shapes: {shown(name)}: got {shown(shape)}; accepted: a list of ints ≥ 0")
    _count(state.get("ranks"), "ranks", 1)
    return {name: [*shape] for name, shape in shapes.items() if isinstance(shape, list)}


def _mapping(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: got {shown(value)}; accepted: an object")
    return value


def _count(value: object, name: str, least: int, most: int = _MOST) -> None:
    if not is_count(value, most, least):
        raise ValueError(f"{name}: got {shown(value)}; accepted: an int, {least} … {most}")


def _digest(value: object, name: str) -> None:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ValueError(f"{name}: got {shown(value)}; accepted: a sha256, 64 hexadecimal digits")


def _loss(value: object, name: str) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"{name}: got {shown(value)}; accepted: a number, or null")


def _engine(value: object, name: str) -> Mapping[str, Any]:
    engine = _mapping(value, name)
    _count(engine.get("seed"), f"{name}.seed", 0, _MAX_SEED)
    for counter in _COUNTERS:
        _count(engine.get(counter), f"{name}.{counter}", 0)
    if not engine["skipped_in_a_row"] <= engine["skipped"] <= engine["steps"]:
        got = f"steps {engine['steps']}, skipped {engine['skipped']}, skipped_in_a_row {engine['skipped_in_a_row']}"
        raise ValueError(f"{name}: got {got}; accepted: no more in a row than in all, and no more than steps")
    return engine


def _data(value: object, name: str) -> None:
    data = _mapping(value, name)
    for counter in ("epoch", "index"):
        _count(data.get(counter), f"{name}.{counter}", 0)
    _count(data.get("seed"), f"{name}.seed", 0, _MAX_SEED)
    _count(data.get("seq_len"), f"{name}.seq_len", 1, LIMITS["block_size"])
    _digest(data.get("tokens_sha256"), f"{name}.tokens_sha256")


def _finite(value: object) -> None:
    if value is None:
        return
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError(f"finite: got {shown(value)}; accepted: null, or engine, data and a loss")
    _engine(value[0], "finite.engine")
    _data(value[1], "finite.data")
    _loss(value[2], "finite.loss")
