"""A training run, from text to report: data → step → log → evaluation → checkpoint, resumable to the bit.

A run is a folder:
    run.json              the configuration that ran
    data/                 tokens and tokenizer
    log.jsonl             what happened, a line each
    checkpoints/          the last few, each whole
    report.html           curves, memory, a sample; needs nothing from outside

SIGTERM and Ctrl-C end the run after the step in hand: it is saved, reported, and can be resumed.
"""

from __future__ import annotations

import json
import math
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ..memory.planned.report import human
from ..model.generate import generate
from .budget import step_report
from .checkpoint import latest_checkpoint, load_into, save_checkpoint
from .config import DTYPES, RunConfig
from .data import Batches, Tokenizer, batches_in_order, default_text, prepare, split, unigram_entropy
from .engine import Engine
from .log import RunLog, read_log, tensorboard_installed
from .report import run_report
from .schedule import learning_rate

Show = Callable[[str, dict[str, Any]], None]  # what happened ("start", "train", "validation", …), and its numbers


@dataclass(frozen=True, slots=True)
class RunResult:
    folder: Path
    steps: int
    train_loss: float
    validation_loss: float | None
    unigram_entropy: float
    planned_bytes: int
    measured_bytes: int
    sample: str
    report: Path
    stopped_by: str | None


def train(
    run: RunConfig, folder: Path, *, resume: Path | bool = False, show: Show = lambda event, numbers: None
) -> RunResult:
    """Train in `folder`. `resume`: True goes on from the newest checkpoint there, a path from that one."""
    if sys.platform != "linux":
        raise ValueError(f"platform: got {sys.platform}; accepted: linux, where a run reads its own memory from /proc")
    checkpoints = folder / "checkpoints"
    if not resume and checkpoints.exists() and any(checkpoints.iterdir()):
        raise ValueError(f"{folder}: holds a run already; resume it (--resume), or choose another folder (--out)")
    source = resume if isinstance(resume, Path) else latest_checkpoint(checkpoints) if resume else None
    if resume and source is None:
        raise ValueError(f"{folder}: got no checkpoint to resume from; accepted: a folder of a run that saved one")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(run.plain(), indent=1) + "\n", encoding="utf-8")
    with RunLog(folder / "log.jsonl", tensorboard=folder / "tensorboard" if tensorboard_installed() else None) as log:
        return _Run(run, folder, log, show).go(source)


class _Run:
    def __init__(self, run: RunConfig, folder: Path, log: RunLog, show: Show) -> None:
        self.run, self.folder, self.log, self.show = run, folder, log, show
        files = [Path(name) for name in run.data.files] or [default_text()]
        tokens, self.tokenizer = prepare(
            files, folder / "data", tokenizer=run.data.tokenizer, vocab_size=run.data.vocab_size
        )
        self.training, self.validation = split(tokens.tokens, run.data.validation_fraction)
        self.entropy = unigram_entropy(tokens.tokens)
        t = run.train
        self.batches = Batches(self.training, t.batch_size, t.seq_len, seed=t.seed)
        _warm_up(t.device)
        before = _resident_bytes(t.device)
        self.engine = Engine(
            run.model, t.batch_size, t.seq_len, t.device, DTYPES[t.dtype], t.seed, t.memory_budget,
            weight_decay=t.weight_decay, max_norm=t.max_norm or math.inf,
        )  # fmt: skip
        self.resident_before = before
        self.validation_loss: float | None = None
        self.train_loss = math.nan

    def go(self, resume: Path | None) -> RunResult:
        t, engine = self.run.train, self.engine
        if resume is not None:
            self._restore(resume)
        self.show("start", {
            "parameters": sum(p.numel() for p in engine.params.values()), "tokens": len(self.training),
            "planned_bytes": engine.plan.peak_bytes, "unigram_entropy": self.entropy, "step": engine.steps, "steps": t.steps,
            "folder": str(self.folder), "resumed_from": None if resume is None else str(resume),
        })  # fmt: skip
        with _stop_on_signals() as stopped:
            while engine.steps < t.steps and not stopped:
                self._step()
                if t.eval_interval and engine.steps % t.eval_interval == 0 and engine.steps < t.steps:
                    self._evaluate()
                if t.checkpoint_interval and engine.steps % t.checkpoint_interval == 0 and engine.steps < t.steps:
                    self._save()
            if not stopped:
                self._evaluate()
            self._save()
            return self._finish(stopped[0] if stopped else None)

    def _step(self) -> None:
        t, engine = self.run.train, self.engine
        rate = learning_rate(
            engine.steps, peak=t.learning_rate, floor=min(t.min_learning_rate, t.learning_rate),
            warmup_steps=t.warmup_steps, total_steps=t.steps,
        )  # fmt: skip
        pairs = [self.batches.next() for _ in range(t.gradient_accumulation)]
        begin = time.perf_counter()
        self.train_loss = engine.gradients([x for x, _ in pairs], [y for _, y in pairs])
        norm = engine.optimizer_step(rate)
        seconds = time.perf_counter() - begin
        numbers = {
            "loss": self.train_loss, "learning_rate": rate, "gradient_norm": norm, "skipped": engine.skipped,
            "tokens_per_second": sum(x.numel() for x, _ in pairs) / seconds, "measured_bytes": self._measured(),
        }  # fmt: skip
        self.log.append(engine.steps, "train", numbers)
        if engine.steps % t.log_interval == 0 or engine.steps in (1, t.steps):
            self.show(
                "train", numbers | {"step": engine.steps, "steps": t.steps, "planned_bytes": engine.plan.peak_bytes}
            )

    def _evaluate(self) -> None:
        t, engine = self.run.train, self.engine
        if len(self.validation) < t.seq_len + 1 or not t.eval_batches:
            return
        total, count = 0.0, 0
        for tokens, targets in batches_in_order(self.validation, t.batch_size, t.seq_len, most=t.eval_batches):
            n = int((targets >= 0).sum())
            total += engine.evaluate(tokens, targets) * n
            count += n
        self.validation_loss = total / count
        self.log.append(engine.steps, "validation", {"loss": self.validation_loss})
        self.show("validation", {"step": engine.steps, "loss": self.validation_loss, "unigram_entropy": self.entropy})

    def _save(self) -> None:
        engine = self.engine
        state = {
            "engine": engine.state(),
            "data": self.batches.state(),
            "run": self.run.plain(),
            "train_loss": _number(self.train_loss),
            "validation_loss": _number(self.validation_loss),
            "threads": torch.get_num_threads(),
        }
        path = save_checkpoint(
            self.folder / "checkpoints", engine.steps, engine.tensors(), state, keep=self.run.train.keep_checkpoints
        )
        self.show("checkpoint", {"step": engine.steps, "path": str(path)})

    def _restore(self, path: Path) -> None:
        checkpoint = load_into(path, self.engine.tensors())
        state = checkpoint.state
        if state["run"]["model"] != self.run.plain()["model"]:
            raise ValueError(
                f"{path}: is of another model; accepted: the [model] it was saved with, {state['run']['model']}"
            )
        self.engine.restore(state["engine"])
        self.batches.restore(state["data"])
        self.train_loss = math.nan if state["train_loss"] is None else state["train_loss"]
        self.validation_loss = state["validation_loss"]
        self.log.append(self.engine.steps, "resume", {"checkpoint": path.name})

    def _finish(self, stopped_by: str | None) -> RunResult:
        engine, t = self.engine, self.run.train
        sample = self._sample()
        memory = step_report(
            engine.plan, self.run.model, t.batch_size, t.seq_len, engine.dtype, engine.recompute, "Memory of one step"
        )
        facts = {
            "model": f"{sum(p.numel() for p in engine.params.values()):,} parameters, {self.run.model.n_layer} layers",
            "steps": f"{engine.steps:,} of {t.steps:,}",
            "loss": f"{self.train_loss:.4f}"
            + (f", validation {self.validation_loss:.4f}" if self.validation_loss else ""),
            "unigram entropy": f"{self.entropy:.4f} nats",
            "memory": f"{human(engine.plan.peak_bytes)} planned, {human(self._measured())} measured",
            "device": f"{t.device}, {t.dtype}, {torch.get_num_threads()} threads",
        }
        page = run_report(
            f"tilegrad: {self.folder.name}", read_log(self.folder / "log.jsonl"), facts=facts, sample=sample,
            unigram_entropy=self.entropy, memory_page=memory.html(),
        )  # fmt: skip
        report = self.folder / "report.html"
        report.write_text(page, encoding="utf-8")
        return RunResult(
            self.folder, engine.steps, self.train_loss, self.validation_loss, self.entropy, engine.plan.peak_bytes,
            self._measured(), sample, report, stopped_by,
        )  # fmt: skip

    def _sample(self) -> str:
        room = self.run.model.block_size // 2
        n = min(self.run.train.sample_tokens, self.run.model.block_size - room)
        source = self.validation if len(self.validation) >= room else self.training
        prompt = [int(token) for token in source[: min(room, 32)]]
        if not n or not prompt:
            return ""
        tokens = generate(
            self.run.model, self.engine.params, prompt, n, temperature=0.8, top_k=50, seed=self.run.train.seed
        )
        return decode_known(self.tokenizer, [*prompt, *tokens])

    def _measured(self) -> int:
        return max(0, _resident_bytes(self.run.train.device) - self.resident_before)


def decode_known(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """Text of tokens; a model's vocabulary may be larger than the tokenizer's, and such a token reads �."""
    text, known = "", [token for token in tokens if token < tokenizer.vocab_size]
    if len(known) == len(tokens):
        return tokenizer.decode(tokens)
    for token in tokens:
        text += tokenizer.decode([token]) if token < tokenizer.vocab_size else "�"
    return text


@contextmanager
def _stop_on_signals() -> Iterator[list[str]]:
    """Inside, SIGTERM and SIGINT put their name into the list instead of ending the process; a second SIGINT does."""
    stopped: list[str] = []

    def note(number: int, frame: FrameType | None) -> None:
        if stopped and number == signal.SIGINT:
            raise KeyboardInterrupt
        stopped.append(signal.Signals(number).name)

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # signals can be caught in the main thread only: elsewhere the caller stops the run
        yield stopped
        return
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _warm_up(device: str) -> None:
    """A product and its threads: BLAS takes tens of megabytes with its first call, whatever the model."""
    torch.ones(512, 512, device=device).mm(torch.ones(512, 512, device=device))


def _resident_bytes(device: str) -> int:
    """What the process holds now: on CUDA what the allocator gave out, else resident memory."""
    if torch.device(device).type == "cuda":
        return torch.cuda.memory_allocated(device)
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
