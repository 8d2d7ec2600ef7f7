"""A conversation with a model, by its tokenizer's chat template.

The template writes the messages and the generation prompt, and the model continues this text. Its turn ends at one of
`eos_token_ids`, or at the special token that the template writes after an answer.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from ..data.chat_template import ChatTemplate, Message
from ..data.tokenizer import Tokenizer, stream_text
from .api import TrainedModel


class ContextFull(ValueError):
    """The conversation has more tokens than the model attends to."""


class Chat:
    """`messages` are all messages so far. `cut` says why the last answer is incomplete; None: it is complete."""

    def __init__(
        self,
        model: TrainedModel,
        *,
        system: str | None = None,
        max_tokens: int | None = None,
        temperature: float = 0.8,
        top_k: int | None = None,
        seed: int = 0,
    ) -> None:
        """max_tokens: the most tokens of an answer; None: as many as the context has room for."""
        if model.chat_template is None:
            raise ValueError(
                f"{model.checkpoint}: got no chat template; accepted: weights with chat_template.jinja, or with a "
                "chat_template in tokenizer_config.json, and runs that began with them; to continue a text, use `tilegrad "
                "generate`"
            )
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens: got {max_tokens}; accepted: an int ≥ 1")
        self._model, self._template, self._max_tokens = model, model.chat_template, max_tokens
        self._sampling = {"temperature": temperature, "top_k": top_k, "seed": seed}
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._stop = model.eos_token_ids | end_of_turn(self._template, model.tokenizer)
        self.clear()

    def clear(self) -> None:
        """Begin a new conversation."""
        self.messages = [*self._system]
        self.cut: str | None = None

    def answer(self, text: str) -> Iterator[str]:
        """Yields the answer as it is generated. When it ends, `text` and the answer are appended to `messages`."""
        model, size = self._model, self._model.config.block_size
        messages: list[Message] = [*self.messages, {"role": "user", "content": text}]
        prompt = self._template.render(messages, generation_prompt=True).text
        encoded = model.tokenizer.encode_with_offsets([prompt], add_special_tokens=False)[0].tokens
        tokens = [int(token) for token in encoded]
        room = size + 1 - len(tokens)  # the model does not read the last token that it writes
        if room < 1:
            raise ContextFull(
                f"context: got a conversation of {len(tokens):,} tokens; accepted: at most {size:,}, the model's block_size"
            )
        most = room if self._max_tokens is None else min(room, self._max_tokens)
        written: list[int] = []

        def counted() -> Iterator[int]:
            for token in model.tokens(tokens, most, stop=self._stop, **self._sampling):  # type: ignore[arg-type]
                written.append(token)
                yield token

        pieces: list[str] = []
        for piece in stream_text(model.tokenizer, counted(), after=tokens):
            pieces.append(piece)
            yield piece
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
        self.cut = None
        if len(written) == most:
            why = f"the context is full, {size:,} tokens" if most == room else f"max_tokens is {most:,}"
            self.cut = f"answer: cut after {most:,} tokens, because {why}"


def end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> frozenset[int]:
    """The special token that the template writes after an answer, if it writes one there."""
    mark = f"x{secrets.token_hex(8)}"
    text = template.render([{"role": "user", "content": "x"}, {"role": "assistant", "content": mark}]).text
    (after,) = tokenizer.encode_with_offsets([text.rpartition(mark)[2].lstrip()], add_special_tokens=False)
    return frozenset({int(after.tokens[0])}) if len(after.tokens) and after.special[0] else frozenset()
