"""Conversations → text, and which parts of it the assistant says.

Accepted lines of .jsonl, named by `data.format`, or found in the first line:

    messages       {"messages": [{"role": "user", "content": …}, {"role": "assistant", "content": …}, …]}
    prompt         {"prompt": …, "completion": …}, or "response" in place of "completion"; strings, or lists of messages
    instruction    {"instruction": …, "input": …, "output": …}; "input" may be absent

With a chat template the text is what the template makes of the messages. Without one, a prompt and its completion follow each
other and EOS ends them; messages need a template.

The assistant's turn i is found by rendering twice. Let R(n) be the text of the first n messages and G(n) the same with the
generation prompt, which ends where the model begins to write. The turn begins where G(i) and the whole text part, and ends at
the end of R(i + 1). Both must be prefixes of the whole text: a template that writes earlier turns in another way once later
ones follow is refused, unless it marks the assistant's text with {% generation %} itself.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from ..text.untrusted import decoded, file_in, parse_json, shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from jinja2 import Environment, Template
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.runtime import Context

Format: TypeAlias = Literal["messages", "prompt", "instruction"]
Message: TypeAlias = dict[str, object]  # role, content, and what else the template reads
Span: TypeAlias = tuple[int, int]  # characters [begin, end)

MAX_LINES = 1_000_000  # of a template's code that run for one conversation: more is a template that does not end
MAX_LENGTH = 1 << 24  # characters or elements of a value that a template makes
_REQUIRED: dict[Format, tuple[tuple[str, ...], ...]] = {  # one name of each tuple
    "messages": (("messages",),),
    "prompt": (("prompt",), ("completion", "response")),
    "instruction": (("instruction",), ("output",)),
}


@dataclass(frozen=True, slots=True)
class Conversation:
    """`spans`: what the assistant says, with the end of its turn, in the order of the text."""

    text: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's Jinja template. It runs sandboxed: it reads the messages and writes text, and nothing else."""

    source: str
    name: str  # the file that it is from
    special_tokens: dict[str, str]  # "bos_token", "eos_token", …: what the template may write

    @cached_property
    def _compiled(self) -> Template:
        jinja2, environment = _jinja()
        try:
            return environment.from_string(self.source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ValueError(f"{self.name}: is no template that Jinja2 can read: {error}") from error

    def render(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> Conversation:
        """The text, with the spans that the template itself marks."""
        jinja2, _ = _jinja()
        begin, end = (f"<{secrets.token_hex(8)}>" for _ in range(2))  # no message holds them
        try:
            with _line_limit():
                text = self._compiled.render(
                    messages=messages,
                    add_generation_prompt=generation_prompt,
                    generation_marks=(begin, end),
                    **self.special_tokens,
                )
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
            raise ValueError(f"the chat template refuses it: {error} ({self.name})") from error
        except RecursionError as error:
            raise ValueError(f"the chat template calls itself without end ({self.name})") from error
        return _without_marks(text, begin, end)

    def conversation(self, messages: Sequence[Message]) -> Conversation:
        """The text of all messages, with the spans that the assistant says."""
        whole = self.render(messages)
        if whole.spans:
            return whole
        return Conversation(whole.text, tuple(self._turns(messages, whole.text)))

    def _turns(self, messages: Sequence[Message], whole: str) -> Iterator[Span]:
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:i]).text if i else ""
            prompt = self.render(messages[:i], generation_prompt=True).text if i else ""
            after = self.render(messages[: i + 1]).text
            if not (whole.startswith(before) and whole.startswith(after)):
                raise ValueError(
                    f"messages[{i}]: the chat template writes this turn in another way once more messages follow, so what the "
                    f"assistant says can't be told from the rest; accepted: one assistant turn in each line, a template with "
                    f"{{% generation %}} marks, or data.train_on all ({self.name})"
                )
            parts = next((n for n, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
            begin = max(len(before), parts)
            yield begin, len(after)


def detect_format(record: dict[str, object]) -> Format | None:
    """The format that has all of its fields in `record`."""
    found = [name for name, fields in _REQUIRED.items() if all(_first(record, names) for names in fields)]
    return found[0] if found else None


def read_messages(record: dict[str, object], format: Format) -> list[Message]:
    """The messages of one line; the assistant speaks in at least one of them."""
    for names in _REQUIRED[format]:
        if _first(record, names) is None:
            has = ", ".join(map(shown, [*record][:20])) or "no field"
            raise ValueError(
                f"got {has}; accepted: an object with {' or '.join(map(repr, names))} (data.format {format})"
            )
    if format == "messages":
        messages = _messages(record["messages"], "messages")
    elif format == "prompt":
        answer = _first(record, ("completion", "response")) or ""
        messages = _turn(record["prompt"], "prompt", "user") + _turn(record[answer], answer, "assistant")
    else:
        asked, given = (_text(record.get(name, ""), name) for name in ("instruction", "input"))
        asked = f"{asked}\n\n{given}" if given else asked
        messages = _turn(asked, "instruction", "user") + _turn(record["output"], "output", "assistant")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("messages: got no assistant's turn; accepted: at least one, because that is what is learnt")
    return messages


def plain_conversation(messages: Sequence[Message], format: Format, eos: str) -> Conversation:
    """prompt + completion + EOS, where there is no chat template."""
    if format == "messages" or not all(isinstance(message["content"], str) for message in messages):
        raise ValueError(
            "messages: got no chat template; accepted: weights (--init) with chat_template.jinja, or with a chat_template in "
            "tokenizer_config.json; or lines of prompt and completion"
        )
    *asked, answer = (str(message["content"]) for message in messages)
    prompt = "".join(asked) + ("\n\n" if format == "instruction" else "")
    text = prompt + answer + eos
    return Conversation(text, ((len(prompt), len(text)),))


def trained_tokens(conversation: Conversation, starts: Sequence[int], special: Sequence[bool]) -> list[bool]:
    """Which tokens are targets: those that begin in a span and, where the span has a special token (the end of the turn), none
    after its last one. `starts`: the character at which each token begins."""
    trained = [False] * len(starts)
    for begin, end in conversation.spans:
        inside = [n for n, start in enumerate(starts) if begin <= start < end]
        last = max((n for n in inside if special[n]), default=inside[-1] if inside else -1)
        for n in inside:
            trained[n] = n <= last
    return trained


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """The chat template of a folder of weights: chat_template.jinja, or the one of tokenizer_config.json."""
    settings: dict[str, object] = {}
    if (folder / "tokenizer_config.json").exists():
        path = file_in(folder, "tokenizer_config.json")
        found = parse_json(decoded(path), str(path))
        if not isinstance(found, dict):
            raise ValueError(f"{path}: got {type(found).__name__}; accepted: an object")
        settings = found
    tokens = {
        name: text for name in ("bos_token", "eos_token", "pad_token", "unk_token") if (text := _token(settings, name))
    }
    if (folder / "chat_template.jinja").exists():
        path = file_in(folder, "chat_template.jinja")
        return ChatTemplate(decoded(path), str(path), tokens)
    path, source = folder / "tokenizer_config.json", settings.get("chat_template")
    if isinstance(source, list):  # several, each with a name
        named = {str(one.get("name")): one.get("template") for one in source if isinstance(one, dict)}
        source = named.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ValueError(f"{path}: chat_template: got {shown(source)}; accepted: a Jinja template")
    return ChatTemplate(source, str(path), tokens)


def _token(settings: dict[str, object], name: str) -> str | None:
    """A special token's text, which tokenizer_config.json has as a string or as an object with its content."""
    value = settings.get(name)
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _first(record: dict[str, object], names: Sequence[str]) -> str | None:
    return next((name for name in names if record.get(name) is not None), None)


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}: got {shown(value)}; accepted: text")
    return value


def _turn(value: object, name: str, role: str) -> list[Message]:
    """One message of `role`, or the messages that the value lists."""
    if isinstance(value, list):
        return _messages(value, name)
    return [{"role": role, "content": _text(value, name)}]


def _messages(value: object, name: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name}: got {shown(value)}; accepted: a list of messages, each with a role and a content")
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"{name}[{i}]: got {shown(message)}; accepted: an object with a role and a content")
        if not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):
            raise ValueError(f"{name}[{i}].content: got {shown(message.get('content'))}; accepted: text")
    return value


def _without_marks(text: str, begin: str, end: str) -> Conversation:
    """The text without the marks of {% generation %}, and the spans between them."""
    plain, spans, rest = "", [], text
    while begin in rest:
        before, _, rest = rest.partition(begin)
        marked, _, rest = rest.partition(end)
        spans.append((len(plain) + len(before), len(plain) + len(before) + len(marked)))
        plain += before + marked
    return Conversation(plain + rest, tuple(spans))


def _raise_exception(message: str) -> None:
    """What templates call to refuse a conversation."""
    raise ValueError(message)


@contextmanager
def _line_limit() -> Iterator[None]:
    """Stop a template that runs more than MAX_LINES lines of its code."""
    lines = 0

    def count(_frame: FrameType, _event: str, _argument: object) -> Callable[..., object]:
        nonlocal lines
        lines += 1
        if lines > MAX_LINES:
            raise ValueError(f"it has not ended after {MAX_LINES:,} lines")
        return count

    outer = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(outer)


@cache
def _jinja() -> tuple[ModuleType, Environment]:
    """(jinja2, a sandbox that reads {% generation %} … {% endgeneration %} and makes no value larger than MAX_LENGTH)."""
    try:
        import jinja2
        from jinja2 import ext, nodes, sandbox
    except ImportError as error:
        raise ImportError(
            "data: got conversations and a chat template, which needs Jinja2: pip install 'tilegrad[chat]'"
        ) from error

    class Generation(ext.Extension):
        tags: ClassVar = {"generation"}

        def parse(self, parser: Parser) -> Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("marked", [nodes.ContextReference()])
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def marked(self, context: Context, caller: Callable[[], str]) -> str:
            begin, end = context["generation_marks"]
            return f"{begin}{caller()}{end}"

    class Sandbox(sandbox.ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"+", "*", "**"})

        def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
            sizes = [
                x if isinstance(x, int | float) else len(x) for x in (left, right) if isinstance(x, int | float | Sized)
            ]
            if (
                len(sizes) == 2
                and (abs(sizes[0]) * abs(sizes[1]) if operator == "*" else max(map(abs, sizes))) > MAX_LENGTH
            ):
                raise ValueError(f"{operator} would make a value larger than {MAX_LENGTH:,}")
            return super().call_binop(context, operator, left, right)

    made = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    made.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "sort_keys": False}
    return jinja2, made
