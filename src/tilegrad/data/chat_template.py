"""The chat template of a tokenizer: messages → text, and the spans of the text that the assistant writes.

The span of an assistant message i is found by rendering prefixes of the conversation. Let R(n) be the text of the first n
messages, and G(n) the same text with the generation prompt, which ends where the model begins to write. The span begins where
G(i) and the whole text first differ, or at the end of G(i), but not before the end of R(i). It ends at the end of R(i + 1).
R(i) and R(i + 1) must be prefixes of the whole text. The span of the first message (i = 0) begins after the generation
prompt in R(1); this prompt is what the template adds to a conversation of one message of the user. If a template writes
earlier messages differently once later messages follow, it is refused, unless it marks the assistant's text with
{% generation %}. Then the marks give the spans.

A template is untrusted code, which runs in a sandbox (sandbox.py).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ..text.untrusted import decoded, file_in, read_json, shown
from .sandbox import jinja, limits

if TYPE_CHECKING:
    from jinja2 import Template

Message: TypeAlias = dict[str, object]  # role, content, and other keys that the template reads
Span: TypeAlias = tuple[int, int]  # (begin, end) of the characters [begin, end)

CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True, slots=True)
class Conversation:
    """`spans`: the parts of `text` that the assistant writes, in order. Each includes the tokens that end the message,
    unless the template marks the spans by {% generation %}: then each is exactly the marked text."""

    text: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class ChatTemplate:
    """The Jinja2 template of a tokenizer, which reads messages and writes text."""

    source: str
    name: str  # the file from which the template was read
    special_tokens: dict[str, str]  # "bos_token", "eos_token", …: text that the template may write

    @cached_property
    def _compiled(self) -> Template:
        jinja2, environment = jinja()
        try:
            return environment.from_string(self.source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ValueError(f"{self.name}: is not a template that Jinja2 can read: {error}") from error

    def render(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> Conversation:
        """The text, with the spans that the template marks by {% generation %}."""
        jinja2, _ = jinja()
        begin, end = (f"<{secrets.token_hex(8)}>" for _ in range(2))  # random, so that no message contains them
        compiled = self._compiled
        try:
            with limits():
                text = compiled.render(
                    messages=messages,
                    add_generation_prompt=generation_prompt,
                    generation_marks=(begin, end),
                    **self.special_tokens,
                )
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
            raise ValueError(f"the chat template refuses this conversation: {error} ({self.name})") from error
        except MemoryError as error:
            raise ValueError(f"the chat template makes a value that is too large for memory ({self.name})") from error
        except RecursionError as error:
            raise ValueError(f"the chat template calls itself endlessly ({self.name})") from error
        for i, message in enumerate(messages):
            if isinstance(message.get("content"), list) and str(message["content"]) in text:
                raise ValueError(
                    f"messages[{i}].content: got a list, which the chat template writes as Python writes it; accepted: text "
                    f"({self.name})"
                )
        return _without_marks(text, begin, end)

    def conversation(self, messages: Sequence[Message]) -> Conversation:
        """The text of all messages, with the spans that the assistant writes."""
        whole = self.render(messages)
        if whole.spans:
            return whole
        return Conversation(whole.text, tuple(self._turns(messages, whole.text)))

    def _turns(self, messages: Sequence[Message], whole: str) -> Iterator[Span]:
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:i]).text if i else ""
            after = self.render(messages[: i + 1]).text
            if after == before and message.get("content"):
                raise ValueError(f"messages[{i}]: the chat template writes nothing of this message ({self.name})")
            if not (whole.startswith(before) and whole.startswith(after)):
                raise ValueError(
                    f"messages[{i}]: the chat template writes this message, or one before it, differently once more messages "
                    "follow, so the assistant's part of the text is not known; accepted: conversations that end with their "
                    "only assistant message, a template with {% generation %} marks, or data.train_on = 'all' "
                    f"({self.name})"
                )
            if i == 0:
                yield self._first_begin(message, after), len(after)
                continue
            prompt = self.render(messages[:i], generation_prompt=True).text
            same = next((n for n, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
            yield max(len(before), same), len(after)

    def _first_begin(self, message: Message, after: str) -> int:
        """Where the span of a first message begins in `after`, its text."""
        as_user = [message | {"role": "user"}]
        prompt = self.render(as_user, generation_prompt=True).text.removeprefix(self.render(as_user).text)
        if prompt not in after:
            raise ValueError(
                "messages[0]: the chat template does not write the generation prompt before a first message of the "
                "assistant, so the assistant's part of the text is not known; accepted: conversations in which another "
                f"message is before it, a template with {{% generation %}} marks, or data.train_on = 'all' ({self.name})"
            )
        return after.index(prompt) + len(prompt)


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """The chat template of a folder with a tokenizer: chat_template.jinja, or chat_template in tokenizer_config.json."""
    settings = read_tokenizer_config(folder)
    tokens = {name: text for name in _SPECIAL if (text := token_text(settings, name))}
    if (folder / TEMPLATE).exists():
        path = file_in(folder, TEMPLATE)
        return ChatTemplate(decoded(path), str(path), tokens)
    path, source = folder / CONFIG, settings.get("chat_template")
    if isinstance(source, list):  # several templates, each with a name
        named = {str(one.get("name")): one.get("template") for one in source if isinstance(one, dict)}
        source = named.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ValueError(f"{path}: chat_template: got {shown(source)}; accepted: a Jinja2 template")
    return ChatTemplate(source, str(path), tokens)


def read_tokenizer_config(folder: Path) -> dict[str, object]:
    """The content of tokenizer_config.json; {} if there is no such file."""
    if not (folder / CONFIG).exists():
        return {}
    path = file_in(folder, CONFIG)
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path}: got {type(found).__name__}; accepted: an object")
    return found


def token_text(settings: dict[str, object], name: str) -> str | None:
    """The text of a special token. In tokenizer_config.json it is a string, or an object with the key content."""
    value = settings.get(name)
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _without_marks(text: str, begin: str, end: str) -> Conversation:
    """The text without the marks of {% generation %}, and the spans between them."""
    plain, spans, rest = "", [], text
    while begin in rest:
        before, _, rest = rest.partition(begin)
        marked, _, rest = rest.partition(end)
        spans.append((len(plain) + len(before), len(plain) + len(before) + len(marked)))
        plain += before + marked
    return Conversation(plain + rest, tuple(spans))
