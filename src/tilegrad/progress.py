"""A training run as a person watches it: a live bar where rich is installed and there is a terminal, else plain lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

from .memory.page import human


def _line(n: dict[str, Any]) -> str:
    """loss, gradient norm, speed, memory of one training record."""
    memory = f"memory {human(n['planned_bytes'])} planned, {human(n['measured_bytes'])} measured"
    skipped = f"  {n['skipped']} skipped" if n["skipped"] else ""
    return (
        f"loss {n['loss']:7.4f}  lr {n['learning_rate']:.1e}  |g| {n['gradient_norm']:6.3f}  "
        f"{n['tokens_per_second']:>8,.0f} tok/s  {memory}{skipped}"
    )


def _short(n: dict[str, Any]) -> str:
    """The same for a bar of 80 columns."""
    memory = f"{n['planned_bytes'] / 2**20:,.0f} MiB planned, {n['measured_bytes'] / 2**20:,.0f} used"
    return f"loss {n['loss']:.3f} {n['tokens_per_second']:,.0f} tok/s {memory}"


def _message(event: str, n: dict[str, Any]) -> str | None:
    """What is worth a line of its own."""
    if event == "start":
        resumed = f", resumed from {n['resumed_from']} at step {n['step']:,}" if n["resumed_from"] else ""
        idle = f"{n['idle_ranks']} of {n['ranks']} ranks have no micro-batch: gradient_accumulation is {n['micro_batches']}\n"
        return (idle if n["idle_ranks"] else "") + (
            f"{n['parameters']:,} parameters, {n['tokens']:,} tokens to learn from, "
            f"{human(n['planned_bytes'])} planned{resumed}\n"
            f"The text's unigram entropy, the loss of knowing nothing but frequencies: {n['unigram_entropy']:.4f} nats"
        )
    if event == "prepare":
        return str(n["doing"])
    if event == "data":
        left_out = f"; {n['left_out']:,} files of other kinds are left out" if n["left_out"] else ""
        documents = (
            f"{n['documents']:,} document{'s' * (n['documents'] != 1)} in {n['files']:,} file{'s' * (n['files'] != 1)}"
        )
        return f"{documents}, {n['bytes']:,} bytes, {n['tokens']:,} tokens{left_out}"
    if event == "validation":
        below = n["unigram_entropy"] - n["loss"]
        where = f"{abs(below):.2f} {'below' if below > 0 else 'above'} the unigram entropy"
        return f"step {n['step']:>6,}  validation loss {n['loss']:.4f}, {where}"
    if event == "stop":
        return f"{n['signal']} after step {n['step']:,}: saving"
    return None


@contextmanager
def watch(stream: Any = None) -> Iterator[Any]:
    """A `show(event, numbers)` for `train`."""
    out = stream or sys.stdout
    if out.isatty() and find_spec("rich") is not None:
        with _rich(out) as bar:
            yield bar
        return

    def show(event: str, numbers: dict[str, Any]) -> None:
        message = _message(event, numbers)
        if event == "train":
            message = f"step {numbers['step']:>6,} of {numbers['steps']:,}  {_line(numbers)}"
        if message:
            print(message, file=out, flush=True)

    yield show


@contextmanager
def _rich(out: Any) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(bar_width=10), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(file=out, highlight=False))
    bar.start()
    try:
        task = bar.add_task("", total=None)

        def show(event: str, numbers: dict[str, Any]) -> None:
            message = _message(event, numbers)
            if message:
                bar.console.print(message)
            if event == "start":
                bar.update(task, total=numbers["steps"], completed=numbers["step"])
            elif event == "train":
                bar.update(task, completed=numbers["step"], description=_short(numbers))

        yield show
    finally:
        with suppress(OSError):  # of a terminal that is gone
            bar.stop()
