"""A run's tokens, split into training and validation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..data.batches import Batch, Batches, batches_in_order, split, split_windows
from ..data.documents import Numbers
from ..data.tokenizer import Tokenizer
from ..data.tokens import TokenFile, Tokens, unigram_entropy
from .config import RunConfig

_PROMPT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Dataset:
    file: TokenFile
    tokenizer: Tokenizer
    entropy: float  # unigram entropy, in nats
    batches: Batches  # for training
    held_out: Tokens  # the text that validation reads
    windows: Tokens  # the numbers of the validation windows in it
    summary: Numbers  # counts of a new run's text: files, documents, bytes, tokens

    @classmethod
    def split(cls, file: TokenFile, tokenizer: Tokenizer, config: RunConfig, summary: Numbers) -> Dataset:
        t, tokens, fraction = config.train, file.tokens, config.data.validation_fraction
        training: Tokens | None = None  # the numbers of the training windows; None: all
        if config.data.validation == "windows":
            text = held_out = tokens
            training, windows = split_windows(tokens, t.seq_len, fraction, seed=t.seed)
        else:
            text, held_out = split(tokens, fraction)
            windows = np.arange(-(-(len(held_out) - 1) // t.seq_len) if len(held_out) > t.seq_len else 0)
        batches = Batches(text, t.batch_size, t.seq_len, seed=t.seed, windows=training)
        return cls(file, tokenizer, unigram_entropy(tokens), batches, held_out, windows, summary)

    def validation(self, batch_size: int, *, most: int | None = None, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """The validation batches in their order, at most `most`; this rank gets every world-th of them."""
        self.file.check_length()
        seq_len = self.batches.seq_len
        return batches_in_order(
            self.held_out, batch_size, seq_len, most=most, windows=self.windows, rank=rank, world=world
        )

    @property
    def training_tokens(self) -> int:
        return min(self.batches.windows * self.batches.seq_len, len(self.batches.tokens))

    def prompt(self, room: int) -> list[int]:
        """The first held-out tokens, at most `room`; if fewer are held out, the first of the training text."""
        begin = int(self.windows[0]) * self.batches.seq_len if len(self.windows) else 0
        text = self.held_out[begin:] if len(self.held_out) - begin >= room else self.batches.tokens
        return [int(token) for token in text[: min(room, _PROMPT_TOKENS)]]
