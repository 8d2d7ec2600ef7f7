"""Lines of .jsonl → messages. `data.format` names the format; with "auto" the first lines of the file decide it:

    messages       {"messages": [{"role": "user", "content": …}, {"role": "assistant", "content": …}, …]}
    prompt         {"prompt": …, "completion": …}, or "response" instead of "completion"; each is a text or a list of messages
    instruction    {"instruction": …, "input": …, "output": …}; "input" may be absent

A chat template (chat_template.py) makes the text. Without a template, the text is the prompt, its completion and EOS, and
the format "messages" is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

from ..text.untrusted import shown, shown_keys
from .chat_template import Conversation, Message
from .document_file import Mask
from .tokenizer import Encoded

Format: TypeAlias = Literal["text", "messages", "prompt", "instruction"]

_REQUIRED: dict[Format, tuple[tuple[str, ...], ...]] = {  # a record must have one name of each tuple
    "messages": (("messages",),),
    "prompt": (("prompt",), ("completion", "response")),
    "instruction": (("instruction",), ("output",)),
}


def detect_format(record: dict[str, object]) -> Format | None:
    """The first format whose fields are all in `record`; None if no format matches."""
    found = [name for name, fields in _REQUIRED.items() if all(_first_present(record, names) for names in fields)]
    return found[0] if found else None


def read_messages(record: dict[str, object], format: Format) -> list[Message]:
    """The messages of one line, at least one of them from the assistant."""
    for names in _REQUIRED[format]:
        if _first_present(record, names) is None:
            raise ValueError(
                f"got the keys {shown_keys(record)}; accepted: an object with {' or '.join(map(repr, names))} "
                f"(data.format {format})"
            )
    if format == "messages":
        messages = _messages(record["messages"], "messages")
    elif format == "prompt":
        answer = _first_present(record, ("completion", "response")) or ""
        messages = _messages_by(record["prompt"], "prompt", "user") + _messages_by(record[answer], answer, "assistant")
    else:
        instruction, given = (_text(record.get(name, ""), name) for name in ("instruction", "input"))
        question = f"{instruction}\n\n{given}" if given else instruction
        messages = _messages_by(question, "instruction", "user") + _messages_by(record["output"], "output", "assistant")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("messages: got no message of the assistant; accepted: at least one to learn from")
    return messages


def plain_conversation(messages: Sequence[Message], format: Format, end: str) -> Conversation:
    """The text without a chat template: prompt + completion + end."""
    if format == "messages" or not all(isinstance(message.get("content"), str) for message in messages):
        raise ValueError(
            "messages: got no chat template; accepted: weights (--init) with chat_template.jinja, or with a chat_template in "
            "tokenizer_config.json; or lines of prompt and completion"
        )
    *questions, answer = (str(message["content"]) for message in messages)
    prompt = "".join(questions) + ("\n\n" if format == "instruction" else "")
    text = prompt + answer + end
    return Conversation(text, ((len(prompt), len(text)),))


def trained_tokens(conversation: Conversation, encoded: Encoded) -> Mask:
    """Whether each token is a target: whether any of its characters is in a span. White space at the end of a span is no
    target if it follows a special token, such as the token that ends a message."""
    trained = np.zeros(len(encoded.tokens), np.bool_)
    for begin, end in conversation.spans:
        inside = np.flatnonzero((encoded.ends > begin) & (encoded.starts < end))
        ends = np.flatnonzero(encoded.special[inside])
        after = inside[ends[-1] + 1 :] if len(ends) else inside[:0]
        blank = len(after) > 0 and not conversation.text[int(encoded.starts[after[0]]) : end].strip()
        trained[inside[: ends[-1] + 1] if blank else inside] = True
    return trained


def _first_present(record: dict[str, object], names: Sequence[str]) -> str | None:
    return next((name for name in names if record.get(name) is not None), None)


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}: got {shown(value)}; accepted: text")
    return value


def _messages_by(value: object, name: str, role: str) -> list[Message]:
    """One message of `role`, or the messages that the value lists."""
    if isinstance(value, list):
        return _messages(value, name)
    return [{"role": role, "content": _text(value, name)}]


def _messages(value: object, name: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name}: got {shown(value)}; accepted: a list of messages, each with role and content")
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"{name}[{i}]: got {shown(message)}; accepted: an object with role and content")
        if not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):
            raise ValueError(f"{name}[{i}].content: got {shown(message.get('content'))}; accepted: text or a list")
    return value
