"""A run's data, split into training and validation: windows of a text, or documents packed into rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from ..data.batches import Batches, Rows, Windows, batches_in_order, split, split_windows
from ..data.conversations import Format
from ..data.document_file import DocumentFile
from ..data.documents import Numbers, Show, default_text
from ..data.packing import Batch, PackedRows, Pieces, TooLong, cut_documents, split_pieces
from ..data.prepare import TrainOn, prepare
from ..data.tokenizer import Tokenizer
from ..data.tokens import TokenFile, Tokens, unigram_entropy
from .config import DataConfig, RunConfig

_PROMPT_TOKENS = 32


def needs_documents(data: DataConfig) -> bool:
    """Whether rows are made of documents, not of windows."""
    return data.format != "text" or bool(data.packing)


def kept_counts(show: Show, counts: Numbers) -> Show:
    """`show`, except that the numbers of the event "data" go into `counts`."""

    def show_others(event: str, numbers: Numbers) -> None:
        if event == "data":
            counts.update(numbers)
        else:
            show(event, numbers)

    return show_others


def prepare_data(
    config: RunConfig, folder: Path, show: Show, *, documents: bool = False
) -> tuple[TokenFile, Tokenizer]:
    """Write the tokens of a settled run into `folder`; with `documents`, always with documents.bin."""
    data = config.data
    return prepare(
        [Path(name) for name in data.files] or [default_text()],
        folder,
        tokenizer=data.tokenizer,
        vocab_size=data.vocab_size,
        text_field=data.text_field,
        format=cast(Format, data.format),
        train_on=cast(TrainOn, data.train_on),
        packing=documents or bool(data.packing),
        show=show,
    )


@dataclass(frozen=True, slots=True)
class Dataset:
    file: TokenFile
    tokenizer: Tokenizer
    entropy: float  # unigram entropy of the trained tokens, in nats
    batches: Batches  # for training
    held_out: Rows | None  # for validation
    training_tokens: int  # targets in an epoch
    summary: Numbers  # counts of a new run's data: files, documents, bytes, tokens

    @classmethod
    def split(cls, file: TokenFile, tokenizer: Tokenizer, config: RunConfig, summary: Numbers) -> Dataset:
        if needs_documents(config.data) and file.documents is not None:
            return _of_documents(file, file.documents, tokenizer, config, summary)
        t, tokens, fraction = config.train, file.tokens, config.data.validation_fraction
        held_out: Windows | None
        if config.data.validation == "windows":
            training, validation = split_windows(tokens, t.seq_len, fraction, seed=t.seed)
            rows = Windows(tokens, t.seq_len, training)
            held_out = Windows(tokens, t.seq_len, validation) if len(validation) else None
        else:
            text, end = split(tokens, fraction)
            rows = Windows(text, t.seq_len)
            held_out = Windows(end, t.seq_len) if len(end) > t.seq_len else None
        count = min(len(rows.numbers) * t.seq_len, len(rows.tokens))
        batches = Batches(rows, t.batch_size, seed=t.seed)
        return cls(file, tokenizer, unigram_entropy(tokens), batches, held_out, count, summary)

    def validation(self, batch_size: int, *, most: int | None = None, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """The first `most` validation batches, in order; this rank gets every world-th of them."""
        self.file.check_length()
        if self.held_out is None:
            return iter(())
        return batches_in_order(self.held_out, batch_size, most=most, rank=rank, world=world)

    def prompt(self, room: int) -> list[int]:
        """The beginning of the first held-out row, at most `room` tokens; if too little is held out, the beginning of the
        training data. The prompt of a conversation ends where the assistant's text begins."""
        training = self.batches.rows
        if isinstance(training, PackedRows):
            packed = [rows for rows in (self.held_out, training) if isinstance(rows, PackedRows)]
            prompts = (_prompt(rows, number) for rows in packed for number in range(min(len(rows.pieces), 100)))
            return next((prompt for prompt in prompts if len(prompt) <= room), [])
        assert isinstance(training, Windows)
        tokens = training.tokens
        if isinstance(self.held_out, Windows):
            begin = int(self.held_out.numbers[0]) * training.seq_len
            tokens = self.held_out.tokens[begin:] if len(self.held_out.tokens) - begin >= room else tokens
        return [int(token) for token in tokens[: min(room, _PROMPT_TOKENS)]]


def _prompt(rows: PackedRows, number: int) -> list[int]:
    begin, length = int(rows.pieces.begin[number]), int(rows.pieces.length[number])
    untrained = int(np.argmax(rows.file.trained(begin + 1, begin + length + 1))) + 1
    count = untrained if rows.file.bits is not None and untrained > 1 else min(length, _PROMPT_TOKENS)
    return [int(token) for token in rows.tokens[begin : begin + count]]


def _of_documents(
    file: TokenFile, documents: DocumentFile, tokenizer: Tokenizer, config: RunConfig, summary: Numbers
) -> Dataset:
    t, data = config.train, config.data
    pieces = cut_documents(documents, t.seq_len, cast(TooLong, data.too_long))
    seed = t.seed if data.validation == "windows" else None
    training, validation = split_pieces(file.tokens, pieces, data.validation_fraction, seed=seed)

    def rows(numbers: Tokens) -> PackedRows:
        return PackedRows(file.tokens, documents, pieces.choose(numbers), t.seq_len, config.documents)

    training_rows = rows(training)
    batches = Batches(training_rows, t.batch_size, seed=t.seed)
    held_out = rows(validation) if len(validation) else None
    counts = _counts(training_rows, batches, pieces, len(validation)) if summary else {}
    return Dataset(
        file=file,
        tokenizer=tokenizer,
        entropy=unigram_entropy(_trained(file.tokens, documents)),
        batches=batches,
        held_out=held_out,
        training_tokens=training_rows.trained_targets(),
        summary=summary | counts,
    )


def _trained(tokens: Tokens, documents: DocumentFile) -> Tokens:
    return tokens if documents.bits is None else tokens[documents.trained(0, len(tokens))]


def _counts(rows: PackedRows, batches: Batches, pieces: Pieces, held_out: int) -> Numbers:
    """Counts that a run prints when it begins: rows, padding, and documents that are held out, cut or left out."""
    positions = batches.rows_in_epoch * rows.seq_len
    return {
        "pieces": len(pieces),
        "held_out": held_out,
        "rows": batches.rows_in_epoch,
        "trained": rows.trained_targets(),
        "padding": 1 - int(rows.pieces.length.sum()) / positions,
        "cut": pieces.cut,
        "cut_tokens": pieces.cut_tokens,
        "dropped": pieces.dropped,
        "untrained": pieces.untrained,
    }
