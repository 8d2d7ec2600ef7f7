"""The loss on held-out windows in a run, and everything that `tilegrad evaluate` says of a model.

    loss = Σ nll / tokens        perplexity = exp(loss)        bits per byte = Σ nll / ln 2 / bytes

Σ is over the targets, nll in nats. The bytes are those of the text that the targets stand for: a special token, such as the
end of a document, has a loss and no bytes. A token sees only its own window.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from ..data.batches import Batch, batches_in_order
from ..data.documents import Show
from ..data.prepare import prepare
from ..data.tokens import Tokens
from ..engine.batch import count_targets
from ..engine.engine import Engine
from ..engine.machine import check_device
from ..engine.state import write_param
from ..pretrained.weights import is_weights
from .checkpoint import read_state
from .config import DTYPES, RunConfig, TrainConfig, Values, check_vocab_size, initial_run, run_from
from .dataset import Dataset
from .folder import locate, own_data, upgraded
from .ranks import Ranks

_SHOWN_S = 1.0  # between two events of progress


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a model knows of a text. `bits_per_byte` is None if the tokenizer does not say how many bytes a token has, and so is
    `perplexity` if the model's loss is no cross-entropy."""

    loss: float  # nats per token; mean squared error where model.loss is embedding_mse
    perplexity: float | None
    bits_per_byte: float | None
    tokens: int  # targets
    bytes: int | None
    seconds: float


class Evaluator:
    def __init__(self, dataset: Dataset, engine: Engine, ranks: Ranks, settings: TrainConfig) -> None:
        self._dataset, self._engine, self._ranks, self._settings = dataset, engine, ranks, settings
        self.loss: float | None = None  # of the last evaluation

    def run(self) -> float | None:
        """The mean loss; None if no window is held out. Each rank evaluates its share, and the losses are summed."""
        t, dataset, engine, mesh = self._settings, self._dataset, self._engine, self._ranks.mesh
        if not len(dataset.windows) or not t.eval_batches:
            return None
        batches = dataset.validation(
            t.batch_size, most=t.eval_batches, rank=self._ranks.group, world=self._ranks.groups
        )
        total, count = 0.0, 0.0
        for tokens, targets in engine.ranks.padded(list(batches)):
            mesh.at(f"step {engine.steps}: evaluating")
            n = count_targets(targets)
            total += engine.evaluate(tokens, targets) * n
            count += n
        if mesh.world > 1:
            total, count = mesh.sum(total, count)
        self.loss = total / count
        return self.loss


def evaluate_weights(
    params: Mapping[str, Tensor], at: Path, files: Sequence[Path], *, device: str | None, settings: Values, show: Show
) -> Evaluation:
    """Evaluate the weights `params` of `at`, a checkpoint or a folder of weights.

    files      text; none: all windows that the run of the checkpoint holds out
    settings   keys of [train] that differ from the run's: batch_size, seq_len, dtype
    """
    config, tokenizer_file = _run_of(at)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    own = config.train.seq_len
    automatic = {"dtype": "auto"} if is_weights(at) else {}
    t = replace(config.train, **{"device": device, "linear": "plain", **automatic, **settings})
    config = replace(config, train=t)
    t = config.train
    with TemporaryDirectory(prefix="tilegrad-evaluate-") as scratch:
        if files:
            text, tokenizer = prepare(
                files, Path(scratch), tokenizer=str(tokenizer_file), text_field=config.data.text_field, show=show
            )
            check_vocab_size(config, text.vocab_size)
            windows = min(t.seq_len, max(1, len(text.tokens) - 1))  # a shorter text is one window
            batches = batches_in_order(text.tokens, t.batch_size, windows)
            count = -(-(len(text.tokens) - 1) // windows)
        elif t.seq_len != own:
            raise ValueError(
                f"seq_len: got {t.seq_len}; accepted: the run's own, {own}, because it gives the windows that are held out; "
                "any other with --data"
            )
        else:
            dataset = Dataset.split(*own_data(locate(at)[0], read_state(at)), config, {})
            if not len(dataset.windows):
                raise ValueError(
                    f"{at}: got a run that holds out no window for validation; accepted: text, with --data"
                )
            tokenizer, batches, count = dataset.tokenizer, dataset.validation(t.batch_size), len(dataset.windows)
        engine = Engine(config.model, t.batch_size, t.seq_len, t.device, DTYPES[t.dtype], deterministic=t.deterministic)
        for name, value in params.items():
            write_param(engine, name, value)
        return _evaluate(engine, batches, tokenizer.byte_lengths(), of=-(-count // t.batch_size), show=show)


def _run_of(at: Path) -> tuple[RunConfig, Path]:
    """The settings of a checkpoint's run, or those that fine-tune a folder of weights; and the file of the tokenizer."""
    if is_weights(at):
        config = initial_run(at)
        return config, Path(config.data.tokenizer)
    config = run_from(upgraded(read_state(at)["run"]), f"{at}/manifest.json")
    return config, locate(at)[0] / "data" / "tokenizer.json"


def _evaluate(engine: Engine, batches: Iterable[Batch], lengths: Tokens | None, *, of: int, show: Show) -> Evaluation:
    """`lengths`: bytes of each token. `of`: how many batches there are, for `show`, which gets "evaluate" once a second."""
    began = last_shown = time.monotonic()
    total, count, nbytes = 0.0, 0, 0
    for number, (tokens, targets) in enumerate(batches, 1):
        n = count_targets(targets)
        total += engine.evaluate(tokens, targets) * n
        count += n
        if lengths is not None:
            nbytes += int(lengths[targets[targets >= 0].numpy()].sum())
        if time.monotonic() - last_shown > _SHOWN_S and count:
            last_shown = time.monotonic()
            show("evaluate", {"batch": number, "batches": of, "loss": total / count, "tokens": count})
    if not count:
        raise ValueError("data: got no token to predict; accepted: text of at least two tokens")
    loss, is_nats = total / count, engine.config.loss == "cross_entropy"
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
