"""Documents → rows of seq_len positions. A row may hold several documents.

A document of L tokens has L − 1 positions: position j reads token j and predicts token j + 1, so no target crosses a document.

    row       tokens    a0 a1 a2 b0 b1  0  0           documents a (4 tokens) and b (3 tokens), then padding
              targets   a1 a2 a3 b1 b2 −1 −1           −1: no target, or a target that is not trained on
    cu_seqlens          0        3     5     7         ends in the flattened batch; the padding of a row is a document

`too_long` says what happens to a document with more than seq_len positions:

    cut       only its first seq_len positions are used
    split     it becomes pieces of seq_len positions, each treated as a document; no target is lost
    drop      it is left out
    refuse    it is an error

So a document becomes one piece, no piece or, with split, several pieces. A piece without a trained target is left out too.
`Pieces` counts the documents and the pieces that are left out.

Rows are filled first-fit: each piece is put into the first open row that has room. The seed draws an order of the pieces
for each epoch. A row is closed when it is full, when it has documents − 1 pieces, or when it is the oldest of OPEN rows and
another row is needed. `documents` is the most documents of a row, and padding counts as one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch

from .document_file import DocumentFile, Mask
from .tokens import Tokens

# tokens, targets (b, T) int64; cu_seqlens (n + 1,) int32
Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
Row: TypeAlias = Tokens  # the indices of the pieces of a row, or the number of its window
Order: TypeAlias = "Tokens | list[Row]"  # (rows, 1), or rows of unequal length
TooLong = Literal["cut", "split", "drop", "refuse"]

OPEN = 1024  # the most open rows; first-fit searches only these


@dataclass(frozen=True, slots=True)
class Pieces:
    """Piece i reads tokens[begin[i] : begin[i] + length[i]]; its targets are one token later."""

    begin: Tokens  # (n,) int64
    length: Tokens  # (n,) int64
    cut: int = 0  # number of documents that were cut
    cut_tokens: int = 0  # number of tokens that they lost
    dropped: int = 0  # number of documents left out because they are too long
    untrained: int = 0  # number of pieces left out because they have no trained target

    def __len__(self) -> int:
        return len(self.begin)

    def choose(self, numbers: Tokens) -> Pieces:
        return Pieces(self.begin[numbers], self.length[numbers])


def cut_documents(file: DocumentFile, seq_len: int, too_long: TooLong) -> Pieces:
    """The pieces of the documents, in the order of the documents."""
    begin = np.concatenate([np.zeros(1, np.int64), file.ends[:-1]])
    length = file.ends - begin - 1
    long = length > seq_len
    count, lost, dropped = int(long.sum()), 0, 0
    if too_long == "refuse" and count:
        worst = int(np.argmax(length))
        raise ValueError(
            f"too_long: got {count:,} documents longer than seq_len, {seq_len}; the longest is document {worst + 1} with "
            f"{int(length[worst]) + 1:,} tokens; accepted: none with 'refuse'; use a larger seq_len, or 'cut', 'split' "
            "or 'drop'"
        )
    if too_long == "cut":
        lost = int((length[long] - seq_len).sum())
        length = np.minimum(length, seq_len)
    elif too_long == "drop":
        begin, length, dropped = begin[~long], length[~long], count
    elif too_long == "split":
        parts = np.maximum(-(-length // seq_len), 1)
        number = np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)
        begin = np.repeat(begin, parts) + number * seq_len
        length = np.minimum(np.repeat(length, parts) - number * seq_len, seq_len)
    kept = _has_target(file, begin, length)
    cut = count if too_long == "cut" else 0
    return Pieces(begin[kept], length[kept], cut, lost, dropped, int((~kept).sum()))


def _has_target(file: DocumentFile, begin: Tokens, length: Tokens) -> Mask:
    """Whether each piece has a trained target."""
    if file.bits is None:
        return length > 0
    return np.array(
        [bool(file.trained(b + 1, b + n + 1).any()) for b, n in zip(begin.tolist(), length.tolist(), strict=True)],
        np.bool_,
    )


def split_pieces(tokens: Tokens, pieces: Pieces, fraction: float, *, seed: int | None) -> tuple[Tokens, Tokens]:
    """(training, validation) as indices of pieces; at most ⌊fraction · n⌋ pieces are held out. The seed draws these pieces and
    their order; seed=None takes the last pieces. Pieces with equal tokens are never split between training and validation."""
    n = len(pieces)
    room = math.floor(n * fraction)
    order = np.arange(n)[::-1] if seed is None else np.random.default_rng([seed, 0, 1]).permutation(n)
    same: dict[bytes, list[int]] = {}
    for number in order.tolist() if room else ():
        begin = int(pieces.begin[number])
        content = tokens[begin : begin + int(pieces.length[number]) + 1]
        same.setdefault(hashlib.sha256(content.tobytes()).digest(), []).append(number)
    held_out: list[int] = []
    for numbers in same.values():
        if len(held_out) + len(numbers) <= room:
            held_out += numbers
    validation = np.array(held_out if seed is not None else sorted(held_out), np.int64)
    return np.setdiff1d(np.arange(n), validation), validation


def first_fit(lengths: Tokens, seq_len: int, most: int) -> list[list[int]]:
    """Rows of indices into `lengths`; a row has at most `most` pieces and seq_len positions."""
    rows: list[list[int]] = []
    room = np.zeros(OPEN, np.int64)  # free positions of the open rows, the oldest first
    numbers: list[int] = []  # indices of the open rows in `rows`
    for i, length in enumerate(lengths.tolist()):
        fits = room[: len(numbers)] >= length
        at = int(fits.argmax()) if len(numbers) else 0
        if not len(numbers) or not fits[at]:
            if len(numbers) == OPEN:
                _close(room, numbers, 0)
            at = len(numbers)
            numbers.append(len(rows))
            room[at] = seq_len
            rows.append([])
        row = rows[numbers[at]]
        row.append(i)
        room[at] -= length
        if room[at] == 0 or len(row) == most:
            _close(room, numbers, at)
    return rows


def _close(room: Tokens, numbers: list[int], at: int) -> None:
    room[at : len(numbers) - 1] = room[at + 1 : len(numbers)]
    numbers.pop(at)


class PackedRows:
    """Rows of several documents. With documents=0 each row has one document and needs no cu_seqlens, because attention is
    causal and the padding follows the document."""

    def __init__(self, tokens: Tokens, file: DocumentFile, pieces: Pieces, seq_len: int, documents: int) -> None:
        if not len(pieces):
            raise ValueError(
                f"files: got no document with a target within seq_len, {seq_len}; accepted: at least one; use a larger "
                "seq_len, or too_long 'split'"
            )
        self.tokens, self.file, self.pieces = tokens, file, pieces
        self.seq_len, self.documents = seq_len, documents

    def order(self, seed: int, epoch: int) -> Order:
        return self._rows(np.random.default_rng([seed, epoch]).permutation(len(self.pieces)))

    def in_order(self) -> Order:
        return self._rows(np.arange(len(self.pieces)))

    def _rows(self, order: Tokens) -> Order:
        if not self.documents:
            return order[:, None]
        return [order[row] for row in first_fit(self.pieces.length[order], self.seq_len, self.documents - 1)]

    def sha256(self) -> str:
        """The sha256 of everything that rows depend on: `documents`, tokens, pieces and trained bits."""
        bits = np.zeros(0, np.uint8) if self.file.bits is None else self.file.bits
        found = hashlib.sha256(f"{self.documents}".encode())
        for array in (self.tokens, self.pieces.begin, self.pieces.length, bits):
            found.update(np.ascontiguousarray(array).data)
        return found.hexdigest()

    def gather(self, rows: Sequence[Row]) -> Batch:
        inputs = torch.zeros(len(rows), self.seq_len, dtype=torch.int64)
        targets = torch.full((len(rows), self.seq_len), -1, dtype=torch.int64)
        ends = [0]
        for row, numbers in enumerate(rows):
            at = 0
            for number in numbers.tolist():
                begin, length = int(self.pieces.begin[number]), int(self.pieces.length[number])
                piece = self.tokens[begin : begin + length + 1].astype(np.int64)
                trained = self.file.trained(begin + 1, begin + length + 1)
                inputs[row, at : at + length] = torch.from_numpy(piece[:-1])
                targets[row, at : at + length] = torch.from_numpy(np.where(trained, piece[1:], -1))
                at += length
                ends.append(row * self.seq_len + at)
            if at < self.seq_len:
                ends.append((row + 1) * self.seq_len)
        return inputs, targets, torch.tensor(ends, dtype=torch.int32) if self.documents else None

    def count(self, rows: Iterable[Row]) -> int:
        return int(self.pieces.length[np.concatenate([*rows, np.zeros(0, np.int64)])].sum())

    def trained_targets(self) -> int:
        """The number of trained targets in all pieces."""
        if self.file.bits is None:
            return int(self.pieces.length.sum())
        spans = zip(self.pieces.begin.tolist(), self.pieces.length.tolist(), strict=True)
        return sum(int(self.file.trained(begin + 1, begin + length + 1).sum()) for begin, length in spans)
