"""A conversation with a model, by its tokenizer's chat template.

The template writes the messages and the generation prompt, and the model continues this text. The model's turn ends at one of
`eos_token_ids`, or at the special token that the template writes after an answer.

When the context has no room for an answer, the oldest question and its answer are dropped; the system message stays.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING, Unpack

import torch

from ..data.chat_template import ChatTemplate, Message
from ..data.tokenizer import Tokenizer
from ..engine.decoder import Decoder
from ..engine.sampling import Sampling
from .api import TrainedModel
from .generation import Request, check_text, place, write

if TYPE_CHECKING:
    from .generation import SamplingSettings


class Chat:
    """`messages` are all messages that the model reads. `cut` says why the last answer is incomplete; None: the answer is
    complete. `dropped` says once in a conversation that the model does not read the oldest messages any more."""

    def __init__(
        self,
        model: TrainedModel,
        *,
        system: str | None = None,
        max_tokens: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        invariant: bool = False,
        **sampling: Unpack[SamplingSettings],
    ) -> None:
        """max_tokens: the most tokens of an answer; None: as many as the context has room for."""
        if model.chat_template is None:
            raise ValueError(
                f"{model.checkpoint}: got no chat template; accepted: weights with chat_template.jinja, or with a "
                "chat_template in tokenizer_config.json, and runs that began with them; to continue a text, use `tilegrad "
                "generate`"
            )
        if system is not None:
            check_text("system", system)
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens: got {max_tokens}; accepted: an int ≥ 1")
        self._model, self._template, self._max_tokens = model, model.chat_template, max_tokens
        sampling.setdefault("temperature", 0.8)
        self._sampling = Sampling(**sampling)
        self._eos = model.eos_token_ids | end_of_turn(self._template, model.tokenizer)
        at, compute = place(model, device, dtype)
        self._decoder = Decoder(
            model.config,
            model.params,
            1,
            model.config.block_size,
            device=at,
            dtype=compute,
            penalties=self._sampling.has_penalty,
            invariant=invariant,
        )
        self.system = system
        self._answers = 0  # the number of the next answer's sequence, so that each answer has its own random numbers
        self.reset()

    def reset(self) -> None:
        """Begin a new conversation; the system message stays."""
        self.messages: list[Message] = []
        self.cut: str | None = None
        self.dropped: str | None = None
        self._said = False

    def answer(self, text: str) -> Iterator[str]:
        """Yields the answer as it is generated. When it ends, `text` and the answer are appended to `messages`."""
        for name, given in (("message", text), ("system", self.system or "")):
            check_text(name, given)
        model, size = self._model, self._model.config.block_size
        messages, tokens = self._fitting([*self.messages, {"role": "user", "content": text}])
        room = size + 1 - len(tokens)  # the model does not read the last token that it writes
        most = room if self._max_tokens is None else min(room, self._max_tokens)
        request = Request(tokens, most, self._sampling, self._answers, self._eos)
        self._answers += 1
        pieces, finish = list[str](), None
        for piece in write(self._decoder, [request], model.tokenizer):
            pieces.append(piece.text)
            finish = piece.finish
            yield piece.text
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
        self.cut = None
        if finish == "length":
            why = f"the context is full, {size:,} tokens" if most == room else f"max_tokens is {most:,}"
            self.cut = f"answer: cut after {most:,} tokens, because {why}"

    def _fitting(self, messages: list[Message]) -> tuple[list[Message], list[int]]:
        """The messages and their tokens. The oldest questions and answers are dropped until max_tokens more tokens fit into
        the context, or a quarter of the context if max_tokens is None."""
        size = self._model.config.block_size
        wanted = min(size, size // 4 if self._max_tokens is None else self._max_tokens)
        tokens = self._encode(messages)
        dropped = 0
        self.dropped = None
        while len(tokens) > size + 1 - max(1, wanted) and len(messages) > 1:
            messages, dropped = messages[2:], dropped + 1
            tokens = self._encode(messages)
        if len(tokens) > size:
            raise ValueError(
                f"context: got a message of {len(tokens):,} tokens; accepted: at most {size:,}, the model's block_size"
            )
        if dropped and not self._said:
            self._said = True
            self.dropped = f"context: full, {size:,} tokens; the oldest messages are not read any more"
        return messages, tokens

    def _encode(self, messages: list[Message]) -> list[int]:
        system: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        prompt = self._template.render([*system, *messages], generation_prompt=True).text
        (encoded,) = self._model.tokenizer.encode_with_offsets([prompt], add_special_tokens=False)
        return [int(token) for token in encoded.tokens]


def end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> frozenset[int]:
    """The special token that the template writes after an answer, if it writes one there."""
    mark = f"x{secrets.token_hex(8)}"
    text = template.render([{"role": "user", "content": "x"}, {"role": "assistant", "content": mark}]).text
    (after,) = tokenizer.encode_with_offsets([text.rpartition(mark)[2].lstrip()], add_special_tokens=False)
    return frozenset({int(after.tokens[0])}) if len(after.tokens) and after.special[0] else frozenset()
