"""Rows → batches, in an order that depends only on the seed and the position.

A row is a window of a text, or several documents (packing.py). With T = seq_len, window w has inputs tokens[wT : wT + T] and
targets tokens[wT + 1 : wT + T + 1]. Neighbouring windows share one token, so in an epoch every token except the first is a
target once. The last window may be shorter: it is padded with token 0 and target −1, which the loss ignores.

While a run trains on a shorter length T/k, each window is cut into k pieces: piece j of window w is window w·k + j of length
T/k. batch_size windows give k batches, and batch j has piece j of each window.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NotRequired, Protocol, TypedDict

import numpy as np
import torch

from .packing import Batch, Order, Row
from .tokens import Tokens, tokens_sha256


class Rows(Protocol):
    """The rows that batches are made of: `Windows` or `PackedRows`."""

    seq_len: int

    def order(self, seed: int, epoch: int) -> Order:
        """The rows of an epoch."""

    def in_order(self) -> Order:
        """Every row, for evaluation."""

    def gather(self, rows: Sequence[Row]) -> Batch: ...

    def count(self, rows: Iterable[Row]) -> int:
        """The number of positions of these rows that are not padding."""

    def sha256(self) -> str: ...


class Windows:
    """Windows of a text. `numbers` are the numbers of the windows to use, by default all."""

    def __init__(self, tokens: Tokens, seq_len: int, numbers: Tokens | None = None) -> None:
        self.tokens, self.seq_len = tokens, seq_len
        self.numbers = np.arange(_count_windows(tokens, seq_len)) if numbers is None else numbers

    def order(self, seed: int, epoch: int) -> Order:
        return self.numbers[np.random.default_rng([seed, epoch]).permutation(len(self.numbers))][:, None]

    def in_order(self) -> Order:
        return self.numbers[:, None]

    def gather(self, rows: Sequence[Row]) -> Batch:
        inputs = torch.zeros(len(rows), self.seq_len, dtype=torch.int64)
        targets = torch.full((len(rows), self.seq_len), -1, dtype=torch.int64)
        for row, window in enumerate(int(numbers[0]) for numbers in rows):
            piece = torch.from_numpy(
                self.tokens[window * self.seq_len : (window + 1) * self.seq_len + 1].astype(np.int64)
            )
            length = max(len(piece) - 1, 0)  # 0 if the piece is after the end of the text
            inputs[row, :length] = piece[:-1]
            targets[row, :length] = piece[1:]
        return inputs, targets, None

    def count(self, rows: Iterable[Row]) -> int:
        begin = np.concatenate([*rows, np.zeros(0, np.int64)]) * self.seq_len
        return int(np.clip(len(self.tokens) - 1 - begin, 0, self.seq_len).sum())

    def sha256(self) -> str:
        return tokens_sha256(self.tokens)


class BatchesState(TypedDict):
    """The position of `Batches`, and the values that its order depends on."""

    epoch: int
    index: int
    piece: NotRequired[int]  # the next piece of the rows that begin at `index`; older states lack it
    tokens_read: NotRequired[int]  # older states lack it
    seed: int
    seq_len: int
    tokens_sha256: str  # sha256 of the data that the rows are made of


def split(tokens: Tokens, validation_fraction: float) -> tuple[Tokens, Tokens]:
    """(training, validation): the last ⌊fraction · N⌋ tokens are held out for validation."""
    if not 0 <= validation_fraction < 1:
        raise ValueError(f"validation_fraction: got {validation_fraction}; accepted: at least 0 and less than 1")
    first = len(tokens) - math.floor(len(tokens) * validation_fraction)
    return tokens[:first], tokens[first:]


def split_windows(tokens: Tokens, seq_len: int, validation_fraction: float, *, seed: int = 0) -> tuple[Tokens, Tokens]:
    """(training, validation) as numbers of windows: ⌊fraction · windows⌋ windows are drawn from the whole text for validation.
    These windows stay in the order in which they were drawn, so the first few come from all over the text. No token is a target
    in both training and validation."""
    windows = _count_windows(tokens, seq_len)
    order = np.random.default_rng([seed, 0, 1]).permutation(windows)
    count = math.floor(windows * validation_fraction)
    return np.sort(order[count:]), order[:count]


class Batches:
    """Endless batches for training: `next()` gives batch_size rows, in an order drawn for each epoch.

    A batch may span two epochs, so every batch has batch_size rows. `position` is (epoch, number of rows of this epoch that are
    done). A row is done if every piece of it was read, or left out by `resize`, which changes the size of later batches.
    """

    def __init__(self, rows: Rows, batch_size: int, *, seed: int = 0) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size: got {batch_size}; accepted: at least 1")
        if seed < 0:
            raise ValueError(f"seed: got {seed}; accepted: at least 0")
        self.rows, self.batch_size, self.seed = rows, batch_size, seed
        self._sha256 = rows.sha256()
        self._cut, self._pieces = rows, 1  # rows cut to the current length, and the number of pieces of each row
        self._tokens_read = 0
        self._move(0, 0)

    @property
    def position(self) -> tuple[int, int]:
        return self._begin if self._piece else (self._epoch, self._index)

    @property
    def tokens_read(self) -> int:
        """How many tokens were read, padding not counted."""
        return self._tokens_read

    @property
    def rows_in_epoch(self) -> int:
        """The number of rows of this epoch. With packed rows, the next epoch may have more or fewer."""
        return len(self._order)

    def rows_in(self, epochs: int) -> int:
        """The number of rows of the first `epochs` epochs."""
        if isinstance(self.rows, Windows):
            return epochs * len(self.rows.numbers)
        return sum(len(self.rows.order(self.seed, epoch)) for epoch in range(epochs))

    def resize(self, batch_size: int, seq_len: int) -> None:
        """Continue with batches (batch_size, seq_len). If the size changes, the unread pieces of windows are left out."""
        if (batch_size, seq_len) == (self.batch_size, self._cut.seq_len):
            return
        cut = self.rows
        if seq_len != cut.seq_len:
            if not isinstance(cut, Windows) or cut.seq_len % seq_len:
                raise ValueError(f"seq_len: got {seq_len}; accepted: {cut.seq_len}, or for windows a divisor of it")
            cut = Windows(cut.tokens, seq_len, cut.numbers[:0])  # `gather` and `count` use no numbers
        self.batch_size, self._cut, self._pieces, self._piece = batch_size, cut, self.rows.seq_len // seq_len, 0

    def next(self) -> Batch:
        return self._cut.gather(self._pick())

    def deal(self, count: int, rank: int, world: int) -> list[Batch]:
        """This rank's share of the next `count` batches: every world-th batch. The position is the same on all ranks, so a
        run may resume on any number of ranks."""
        picked = [self._pick() for _ in range(count)]
        return [self._cut.gather(rows) for rows in picked[rank::world]]

    def _pick(self) -> list[Row]:
        """The next batch_size rows or, at a shorter length, the next piece of each of these rows. A batch is skipped if all its
        pieces are after the end of the text."""
        while True:
            if self._piece == 0:
                self._begin, self._taken = self.position, self._take()
            picked = [row * self._pieces + self._piece for row in self._taken] if self._pieces > 1 else self._taken
            self._piece = (self._piece + 1) % self._pieces
            tokens = self._cut.count(picked)
            self._tokens_read += tokens
            if tokens:
                return picked

    def _take(self) -> list[Row]:
        """The next batch_size rows, not yet cut into pieces."""
        picked: list[Row] = []
        while len(picked) < self.batch_size:
            if self._index == len(self._order):
                self._move(self._epoch + 1, 0)
            more = self._order[self._index : self._index + self.batch_size - len(picked)]
            picked.extend(more)
            self._index += len(more)
        return picked

    def state(self) -> BatchesState:
        """The position as plain JSON; `restore` continues from it exactly."""
        epoch, index = self.position
        return {
            "epoch": epoch,
            "index": index,
            "piece": self._piece,
            "tokens_read": self._tokens_read,
            "seed": self.seed,
            "seq_len": self.rows.seq_len,
            "tokens_sha256": self._sha256,
        }

    def restore(self, state: BatchesState) -> None:
        """Continue from the position `state`. Tokens, seq_len and seed must be the same. If the position is between pieces of
        rows, call `resize` first, with the sizes at that position; otherwise batch_size may differ."""
        here = self.state()
        for name in ("seed", "seq_len", "tokens_sha256"):
            if state[name] != here[name]:
                raise ValueError(
                    f"{name}: got {here[name]}; accepted: {state[name]}, as in the saved position: the order depends on it"
                )
        self._move(state["epoch"], state["index"])
        in_epoch, before = self.rows.count(self._order), self.rows.count(self._order[: self._index])
        self._tokens_read = state.get("tokens_read", self._epoch * in_epoch + before)
        piece = state.get("piece", 0)
        if not 0 <= piece < self._pieces:
            raise ValueError(
                f"piece: got {piece}; accepted: 0 … {self._pieces - 1}, the pieces of a row at seq_len {self._cut.seq_len}; "
                "first call `resize` with the sizes at the saved position"
            )
        if piece:
            self._begin, self._taken, self._piece = self.position, self._take(), piece

    def _move(self, epoch: int, index: int) -> None:
        order: Order = self.rows.order(self.seed, epoch) if epoch >= 0 else []
        if epoch < 0 or not 0 <= index <= len(order):
            raise ValueError(f"position: got ({epoch}, {index}); accepted: epoch ≥ 0, rows 0 … {len(order)}")
        self._epoch, self._index, self._piece, self._order = epoch, index, 0, order


def batches_in_order(
    rows: Rows, batch_size: int, *, most: int | None = None, rank: int = 0, world: int = 1
) -> Iterator[Batch]:
    """Batches for evaluation: every row at most once, in order; the last batch may be smaller. most: only the first `most`
    batches are used, the same in every evaluation; None: all. This rank gets every world-th of them."""
    order = rows.in_order()
    for number, begin in enumerate(range(0, len(order), batch_size)):
        if number == most:
            return
        if number % world == rank:
            yield rows.gather([*order[begin : begin + batch_size]])


def _count_windows(tokens: Tokens, seq_len: int) -> int:
    if seq_len < 1:
        raise ValueError(f"seq_len: got {seq_len}; accepted: at least 1")
    if len(tokens) < seq_len + 1:
        raise ValueError(
            f"tokens: got {len(tokens)}; accepted: at least one window, seq_len + 1 = {seq_len + 1}; "
            "give more text (for validation: a larger fraction), or a smaller seq_len"
        )
    return -(-(len(tokens) - 1) // seq_len)
