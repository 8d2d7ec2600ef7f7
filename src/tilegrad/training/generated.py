"""The results of generation: whole sequences, or their tokens as they are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Finish = Literal["eos", "stop", "length"]


@dataclass(frozen=True, slots=True)
class Generated:
    """The continuation of a prompt. `text` ends before EOS or the stop string; `tokens` include the token that ended them."""

    prompt: str | tuple[int, ...]  # as it was given
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] | None  # log softmax(logits)[token], before temperature and filters
    finish: Finish


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of a sequence. `text` is the new text that later tokens can't change; it may be empty."""

    sequence: int  # prompt · num_samples + sample
    text: str
    token: int
    logprob: float
    finish: Finish | None = None  # None before the last token
