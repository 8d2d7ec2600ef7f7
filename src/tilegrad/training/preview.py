"""A preview of the data that a run trains on: counts, lengths of documents, and the first document with its trained part
marked. `tilegrad data` prints it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from ..data.document_file import DocumentFile
from ..data.documents import Numbers, Show
from ..data.packing import PackedRows
from ..data.tokenizer import Tokenizer
from ..data.tokens import Tokens
from .config import RunConfig, check_vocab_size
from .dataset import Dataset, kept_counts, prepare_data

_EXAMPLE = 4000  # tokens of the first document that are shown


@dataclass(frozen=True, slots=True)
class Preview:
    """`example`: the first document in parts, each as (text, whether the run trains on it)."""

    counts: Numbers  # the counts that a run prints when it begins
    lengths: dict[str, float]  # least, median, mean and most tokens of a document
    histogram: dict[str, int]  # "16 … 31" → number of documents with that many tokens
    trained_share: float  # share of trained tokens; the first token of each document is not counted
    padding: dict[str, float]  # share of padding in all positions, with packed and with padded rows; empty for windows
    example: list[tuple[str, bool]]
    example_cut: bool  # whether the first document is longer than `example`


def preview(config: RunConfig, show: Show) -> Preview:
    """The preview of a settled run, from data that is prepared in a temporary folder."""
    counts: Numbers = {}
    with TemporaryDirectory(prefix="tilegrad-data-") as folder:
        file, tokenizer = prepare_data(config, Path(folder), kept_counts(show, counts), documents=True)
        check_vocab_size(config, file.vocab_size)
        documents = file.documents
        assert documents is not None
        dataset = Dataset.split(file, tokenizer, config, counts)
        lengths = np.diff(documents.ends, prepend=0)
        rows = dataset.batches.rows
        padding = _padding(rows, config) if isinstance(rows, PackedRows) else {}
        targets = int((lengths - 1).sum())
        trained = int(documents.trained(0, len(file.tokens)).sum()) if documents.bits is not None else targets
        return Preview(
            counts=dataset.summary,
            lengths={
                "least": int(lengths.min()),
                "median": float(np.median(lengths)),
                "mean": float(lengths.mean()),
                "most": int(lengths.max()),
            },
            histogram=_histogram(lengths),
            trained_share=trained / max(targets, 1),
            padding=padding,
            example=_example(file.tokens, documents, tokenizer),
            example_cut=int(lengths[0]) > _EXAMPLE,
        )


def _padding(rows: PackedRows, config: RunConfig) -> dict[str, float]:
    """The share of padding if these documents are packed, and if each has a row of its own."""
    used, documents = int(rows.pieces.length.sum()), replace(config, data=replace(config.data, packing=True)).documents
    packed = PackedRows(rows.tokens, rows.file, rows.pieces, rows.seq_len, documents)
    return {
        "packed": 1 - used / (len(packed.order(config.train.seed, 0)) * rows.seq_len),
        "padded": 1 - used / (len(rows.pieces) * rows.seq_len),
    }


def _histogram(lengths: Tokens) -> dict[str, int]:
    """The number of documents of each length, in bins whose bounds are powers of two."""
    steps = np.bincount(np.floor(np.log2(np.maximum(lengths, 1))).astype(np.int64))
    first = int(np.flatnonzero(steps)[0])
    return {f"{1 << i:,} … {(2 << i) - 1:,}": int(n) for i, n in enumerate(steps) if i >= first}


def _example(tokens: Tokens, documents: DocumentFile, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    end = min(int(documents.ends[0]), _EXAMPLE)
    trained = documents.trained(0, end)
    if documents.bits is None:
        trained[:1] = False  # the first token is never a target
    parts = groupby(zip(tokens[:end].tolist(), trained.tolist(), strict=True), key=lambda pair: pair[1])
    return [(tokenizer.decode([token for token, _ in part]), is_trained) for is_trained, part in parts]
