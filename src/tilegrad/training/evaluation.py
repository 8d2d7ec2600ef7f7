"""The validation loss, over the same held-out windows or documents each time, and the numbers of `tilegrad evaluate`.

    loss = Σ nll / tokens        perplexity = exp(loss)        bits per byte = Σ nll / ln 2 / bytes

Σ is over the targets, nll in nats. The bytes are those of the targets' text: a special token, such as EOS, has a
loss and no bytes. A token attends only to its own window or document.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import torch
from torch import Tensor

from ..data.batches import Rows, Windows, batches_in_order
from ..data.documents import Show
from ..data.packing import PackedRows, TooLong, cut_documents
from ..data.tokenizer import Tokenizer
from ..data.tokens import Tokens
from ..engine.batch import Batch, count_targets
from ..engine.engine import Engine
from ..engine.machine import check_device, device_or_default
from ..engine.scorer import Scorer
from ..engine.spec import StepSpec
from ..engine.state import averaged
from ..pretrained.weights import is_weights
from .checkpoint import read_state
from .config import DTYPES, OptimizerConfig, RunConfig, TrainConfig, Values, check_vocab_size
from .dataset import Dataset, needs_documents, prepare_data
from .folder import locate, own_data, upgraded
from .ranks import Ranks
from .sections import initial_run, run_from, settled

_PROGRESS_S = 5.0  # seconds between two progress events
# Keys that only training uses. An evaluation has their defaults.
_OF_TRAINING = ("gradient_accumulation", "stages", "masters", "gradients", "linear", "head")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The loss of a model on a text. `bytes` is None if the tokenizer does not know the bytes of its tokens, `perplexity` is
    None if the loss is not a cross-entropy, and `bits_per_byte` is None in both cases, or if there are no bytes."""

    loss: float  # nats per token; mean squared error if model.loss is embedding_mse
    perplexity: float | None
    bits_per_byte: float | None
    tokens: int  # targets
    bytes: int | None
    seconds: float
    weights: str = "raw"  # or "averaged" (optimizer.ema), or "mean of 3 checkpoints"


class Evaluator:
    def __init__(self, dataset: Dataset, engine: Engine, ranks: Ranks, settings: TrainConfig) -> None:
        self._dataset, self._engine, self._ranks, self._settings = dataset, engine, ranks, settings
        self.loss: float | None = None  # the loss of the last evaluation

    def weights(self) -> AbstractContextManager[None]:
        """In this context, the engine computes with the weights to evaluate: averaged ones if the run has optimizer.ema."""
        return averaged(self._engine) if self._engine.spec.ema else nullcontext()

    def run(self) -> float | None:
        """The mean loss; None if nothing is held out or eval_batches is 0. Each rank evaluates its share, and the losses are
        summed."""
        if self._dataset.held_out is None or not self._settings.eval_batches:
            return None
        with self.weights():
            self.loss = self._mean_loss()
        return self.loss

    def _mean_loss(self) -> float:
        t, dataset, engine, mesh = self._settings, self._dataset, self._engine, self._ranks.mesh
        batches = dataset.validation(
            t.batch_size, most=t.eval_batches, rank=self._ranks.group, world=self._ranks.groups
        )
        total, count = 0.0, 0.0
        for tokens, targets, cu_seqlens in engine.ranks.padded([Batch(*batch) for batch in batches]):
            mesh.at(f"step {engine.steps}: evaluating")
            n = count_targets(targets)
            total += engine.evaluate(tokens, targets, cu_seqlens=cu_seqlens) * n
            count += n
        if mesh.world > 1:
            total, count = mesh.sum(total, count)
        return total / count


def evaluate_weights(
    params: Mapping[str, Tensor], at: Path, files: Sequence[Path], *, device: str | None, settings: Values, show: Show
) -> Evaluation:
    """Evaluate the weights `params`, which were loaded from `at`, a checkpoint or a folder of weights.

    files      files of text or conversations; none: all windows or documents that the run of the checkpoint holds out
    settings   keys of [train] that replace those of the run: batch_size, seq_len, dtype
    """
    config, tokenizer_file = _run_of(at)
    device = device_or_default(device)
    check_device(device)
    own = config.train.seq_len
    automatic = {"dtype": "auto"} if is_weights(at) else {}
    trains = {name: getattr(TrainConfig(), name) for name in _OF_TRAINING}
    t = replace(config.train, **{"device": device, **trains, **automatic, **settings})
    config = replace(config, train=t, optimizer=OptimizerConfig())
    with TemporaryDirectory(prefix="tilegrad-evaluate-") as scratch:
        if files:
            config = _with_files(config, files)
            rows, tokenizer = _read(config, tokenizer_file, Path(scratch), show)
        elif config.train.seq_len != own:
            raise ValueError(
                f"seq_len: got {config.train.seq_len}; accepted: the run's value, {own}, because the held-out rows depend "
                "on it; with --data, any value"
            )
        else:
            documents = needs_documents(config.data)
            dataset = Dataset.split(*own_data(locate(at)[0], read_state(at), documents=documents), config, {})
            if dataset.held_out is None:
                raise ValueError(
                    f"{at}: got a run that holds out nothing for validation; accepted: a text, given by --data"
                )
            rows, tokenizer = dataset.held_out, dataset.tokenizer
        t = config.train
        spec = StepSpec(
            config.model,
            t.batch_size,
            t.seq_len,
            DTYPES[t.dtype],
            torch.device(t.device),
            deterministic=t.deterministic,
            invariant=t.invariant,
            documents=config.documents,
        )
        return _evaluate(Scorer(spec, params), rows, t.batch_size, tokenizer.byte_lengths(), show)


def _with_files(config: RunConfig, files: Sequence[Path]) -> RunConfig:
    """The settings with other files, and the format of these files. If the run's files are of the same kind, text or
    conversations, packing and too_long are those of the run; otherwise those of a new run."""
    own = config.data
    data = replace(own, files=tuple(map(str, files)), format="auto", packing=None, too_long="auto")
    new = settled(replace(config, data=data))
    if own.format == "auto" or (own.format == "text") != (new.data.format == "text"):
        return new
    return replace(new, data=replace(new.data, packing=own.packing, too_long=own.too_long))


def _read(config: RunConfig, tokenizer: Path, scratch: Path, show: Show) -> tuple[Rows, Tokenizer]:
    """All rows of config.data.files."""
    t, data = config.train, config.data
    own_config = replace(config, data=replace(data, tokenizer=str(tokenizer)))
    file, made = prepare_data(own_config, scratch, show)
    check_vocab_size(config, file.vocab_size)
    if not needs_documents(data) or file.documents is None:
        return Windows(file.tokens, min(t.seq_len, max(1, len(file.tokens) - 1))), made  # a short text is one window
    pieces = cut_documents(file.documents, t.seq_len, cast(TooLong, data.too_long))
    if pieces.cut or pieces.dropped:
        lost = f"are cut: {pieces.cut_tokens:,} tokens are lost" if pieces.cut else "are left out"
        doing = f"{pieces.cut or pieces.dropped:,} documents longer than a row {lost} (data.too_long {data.too_long})"
        show("prepare", {"doing": doing})
    return PackedRows(file.tokens, file.documents, pieces, t.seq_len, config.documents), made


def _run_of(at: Path) -> tuple[RunConfig, Path]:
    """(settings, file of the tokenizer) of the run of a checkpoint. For a folder of weights, the settings of a run that
    fine-tunes them."""
    if is_weights(at):
        config = initial_run(at)
        return config, Path(config.data.tokenizer)
    config = run_from(upgraded(read_state(at)["run"]), f"{at}/manifest.json")
    return config, locate(at)[0] / "data" / "tokenizer.json"


def _evaluate(scorer: Scorer, rows: Rows, batch_size: int, lengths: Tokens | None, show: Show) -> Evaluation:
    """`lengths`: the number of bytes of each token of the vocabulary. `show` gets the event "evaluate" every few seconds."""
    began = last_shown = time.monotonic()
    batches = -(-len(rows.in_order()) // batch_size)
    total, count, nbytes = 0.0, 0, 0
    for number, (tokens, targets, cu_seqlens) in enumerate(batches_in_order(rows, batch_size), 1):
        n = count_targets(targets)
        total += scorer.loss(tokens, targets, cu_seqlens=cu_seqlens) * n
        count += n
        if lengths is not None:
            nbytes += int(lengths[targets[targets >= 0].numpy()].sum())
        if time.monotonic() - last_shown > _PROGRESS_S and count:
            last_shown = time.monotonic()
            show("evaluate", {"batch": number, "batches": batches, "loss": total / count, "tokens": count})
    if not count:
        raise ValueError("data: got no token to predict; accepted: text of at least two tokens")
    loss, is_nats = total / count, scorer.spec.config.loss == "cross_entropy"
    return Evaluation(
        loss=loss,
        perplexity=_exp(loss) if is_nats else None,
        bits_per_byte=total / math.log(2) / nbytes if is_nats and nbytes else None,
        tokens=count,
        bytes=nbytes if lengths is not None else None,
        seconds=time.monotonic() - began,
    )


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf
