"""Tokens → batches, in an order that depends only on the seed and the position.

Window w has inputs tokens[wT : wT + T] and targets tokens[wT + 1 : wT + T + 1]. Neighbouring windows share one token, so
in an epoch every token except the first is a target once. The last window may be shorter: it is padded with token 0 and
target −1, which the loss ignores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypedDict

import numpy as np
import torch

from .tokens import Tokens, tokens_sha256

Batch = tuple[torch.Tensor, torch.Tensor]  # tokens, targets (b, T) int64


class BatchesState(TypedDict):
    """The position of `Batches`, and the values that its order depends on."""

    epoch: int
    index: int
    seed: int
    seq_len: int
    tokens_sha256: str


def split(tokens: Tokens, validation_fraction: float) -> tuple[Tokens, Tokens]:
    """(training, validation): the last ⌊fraction · N⌋ tokens are held out for validation."""
    if not 0 <= validation_fraction < 1:
        raise ValueError(f"validation_fraction: got {validation_fraction}; accepted: at least 0 and less than 1")
    first = len(tokens) - math.floor(len(tokens) * validation_fraction)
    return tokens[:first], tokens[first:]


def split_windows(tokens: Tokens, seq_len: int, validation_fraction: float, *, seed: int = 0) -> tuple[Tokens, Tokens]:
    """(training, validation) window numbers: ⌊fraction · windows⌋ windows are drawn from the whole text for validation.
    They stay in the order drawn, so the first few come from all over the text. A token is a target in only one part."""
    windows = _count_windows(tokens, seq_len)
    order = np.random.default_rng([seed, 0, 1]).permutation(windows)
    count = math.floor(windows * validation_fraction)
    return np.sort(order[count:]), order[:count]


class Batches:
    """Endless batches for training: `next()` gives batch_size windows, in an order drawn for each epoch.

    A batch may span two epochs, so every batch has batch_size windows. `windows` are the numbers of the windows to use,
    by default all. `position` is (epoch, number of its windows already read).
    """

    def __init__(
        self, tokens: Tokens, batch_size: int, seq_len: int, *, seed: int = 0, windows: Tokens | None = None
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size: got {batch_size}; accepted: at least 1")
        if seed < 0:
            raise ValueError(f"seed: got {seed}; accepted: at least 0")
        self._numbers = np.arange(_count_windows(tokens, seq_len)) if windows is None else windows
        self.windows = len(self._numbers)
        self.batch_size = batch_size
        self.seq_len = seq_len
        self.seed = seed
        self.tokens = tokens
        self._sha256 = tokens_sha256(tokens)
        self._move(0, 0)

    @property
    def position(self) -> tuple[int, int]:
        return self._epoch, self._index

    def next(self) -> Batch:
        return _gather(self.tokens, self._pick(), self.seq_len)

    def deal(self, count: int, rank: int, world: int) -> list[Batch]:
        """This rank's share of the next `count` batches: every world-th. The position is the same on all ranks, so a run
        may resume on any number of ranks."""
        picked = [self._pick() for _ in range(count)]
        return [_gather(self.tokens, windows, self.seq_len) for windows in picked[rank::world]]

    def _pick(self) -> list[int]:
        """The next batch_size windows."""
        picked: list[int] = []
        while len(picked) < self.batch_size:
            if self._index == self.windows:
                self._move(self._epoch + 1, 0)
            more = self._order[self._index : self._index + self.batch_size - len(picked)]
            picked += more.tolist()
            self._index += len(more)
        return picked

    def state(self) -> BatchesState:
        """The position as plain JSON; `restore` continues from it exactly."""
        return {
            "epoch": self._epoch,
            "index": self._index,
            "seed": self.seed,
            "seq_len": self.seq_len,
            "tokens_sha256": self._sha256,
        }

    def restore(self, state: BatchesState) -> None:
        """Continue where `state` was taken. batch_size may differ; tokens, seq_len and seed must be the same."""
        here = self.state()
        for name in ("seed", "seq_len", "tokens_sha256"):
            if state[name] != here[name]:
                raise ValueError(
                    f"{name}: got {here[name]}; accepted: {state[name]}, as in the saved position: the order depends on it"
                )
        self._move(state["epoch"], state["index"])

    def _move(self, epoch: int, index: int) -> None:
        if epoch < 0 or not 0 <= index <= self.windows:
            raise ValueError(f"position: got ({epoch}, {index}); accepted: epoch ≥ 0, windows 0 … {self.windows}")
        self._epoch, self._index = epoch, index
        self._order = self._numbers[np.random.default_rng([self.seed, epoch]).permutation(self.windows)]


def batches_in_order(
    tokens: Tokens,
    batch_size: int,
    seq_len: int,
    *,
    most: int | None = None,
    windows: Tokens | None = None,
    rank: int = 0,
    world: int = 1,
) -> Iterator[Batch]:
    """For evaluation: every window once, first to last or in the order of `windows`; the last batch may be smaller. Only
    the first `most` batches are used, the same in every evaluation. This rank gets every world-th of them."""
    numbers = np.arange(_count_windows(tokens, seq_len)) if windows is None else windows
    for number, begin in enumerate(range(0, len(numbers), batch_size)):
        if number == most:
            return
        if number % world == rank:
            yield _gather(tokens, numbers[begin : begin + batch_size].tolist(), seq_len)


def _count_windows(tokens: Tokens, seq_len: int) -> int:
    if seq_len < 1:
        raise ValueError(f"seq_len: got {seq_len}; accepted: at least 1")
    if len(tokens) < seq_len + 1:
        raise ValueError(
            f"tokens: got {len(tokens)}; accepted: at least one window, seq_len + 1 = {seq_len + 1}; "
            "give more text (for validation: a larger fraction), or a smaller seq_len"
        )
    return -(-(len(tokens) - 1) // seq_len)


def _gather(tokens: Tokens, windows: Sequence[int], seq_len: int) -> Batch:
    inputs = torch.zeros(len(windows), seq_len, dtype=torch.int64)
    targets = torch.full((len(windows), seq_len), -1, dtype=torch.int64)
    for row, window in enumerate(windows):
        piece = torch.from_numpy(tokens[window * seq_len : (window + 1) * seq_len + 1].astype(np.int64))
        inputs[row, : len(piece) - 1] = piece[:-1]
        targets[row, : len(piece) - 1] = piece[1:]
    return inputs, targets
