"""Lines of .jsonl → messages → text by a chat template, and the spans that the assistant says."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from support.chats import BARE, CHATML, GEMMA, LLAMA, MISTRAL

from tilegrad.data.chat_template import ChatTemplate, Message, load_chat_template
from tilegrad.data.conversations import detect_format, plain_conversation, read_messages, trained_tokens
from tilegrad.data.tokenizer import Encoded

MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}</s>{% endgeneration %}"
    "{% else %}U:{{ m.content }}{% endif %}{% endfor %}"
)
THINKING = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content }}{% endfor %}"
)
OPENS_A_THOUGHT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>{% endif %}"
)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TALK: list[Message] = [
    {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "And?"}, {"role": "assistant", "content": "So <|im_end|> it is"},
]  # fmt: skip


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, "chat_template.jinja", TOKENS)


def said(source: str, messages: list[Message] = TALK) -> list[str]:
    found = template(source).conversation(messages)
    return [found.text[begin:end] for begin, end in found.spans]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CHATML, ["Hello<|im_end|>\n", "So <|im_end|> it is<|im_end|>\n"]),
        (LLAMA, ["Hello<|eot_id|>", "So <|im_end|> it is<|eot_id|>"]),
        (MISTRAL, [" Hello</s>", " So <|im_end|> it is</s>"]),
        (MARKED, ["Hello</s>", "So <|im_end|> it is</s>"]),
        (OPENS_A_THOUGHT, ["Hello</s>", "So <|im_end|> it is</s>"]),
    ],
)
def test_spans_are_the_assistants_text_and_the_end_of_its_turn(source: str, expected: list[str]) -> None:
    assert said(source) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CHATML, "Hello<|im_end|>\n"),  # after a system message that the template writes
        (LLAMA, "Hello<|eot_id|>"),
        (GEMMA, "Hello<end_of_turn>\n"),
        (BARE, "Hello\n"),
        (BARE.replace("if add_", "if messages[-1].role == 'user' and add_"), "Hello\n"),
        (MARKED, "Hello</s>"),
    ],
)
def test_the_header_of_a_first_message_of_the_assistant_is_no_target(source: str, expected: str) -> None:
    assert said(source, TALK[1:2]) == [expected]
    assert said(source, TALK[1:])[0] == expected


def test_a_first_message_of_the_assistant_without_the_generation_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match=r"messages\[0\]: the chat template does not write the generation prompt"):
        said(OPENS_A_THOUGHT, TALK[1:2])


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_list_that_a_template_writes_as_python_is_refused(role: str) -> None:
    talk: list[Message] = [dict(message) for message in TALK[:2]]
    i = ["user", "assistant"].index(role)
    talk[i]["content"] = [{"type": "text", "text": "Hello"}]
    with pytest.raises(ValueError, match=rf"messages\[{i}\]\.content: got a list, which the chat template writes as"):
        said(BARE.replace("m.content", "m.content | string"), talk)
    parts = BARE.replace("m.content", "(m.content if m.content is string else m.content[0].text)")
    assert said(parts, talk) == ["Hello\n"]


@pytest.mark.parametrize("source", [CHATML, LLAMA, MISTRAL, MARKED])
def test_the_text_equals_that_of_transformers(source: str) -> None:
    chat = pytest.importorskip("transformers.utils.chat_template_utils", reason="needs transformers")
    rendered, _ = chat.render_jinja_template(conversations=[TALK], chat_template=source, **TOKENS)
    assert template(source).conversation(TALK).text == rendered[0]


def test_a_template_that_rewrites_earlier_turns_is_refused_for_several_turns() -> None:
    assert said(THINKING, TALK[:2]) == ["<assistant><think></think>Hello"]  # the template writes no generation prompt
    with pytest.raises(
        ValueError, match=r"messages\[1\]: the chat template writes this message, or one before it, diff"
    ):
        said(THINKING)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "ran more than"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "endlessly"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{% for", "not a template that Jinja2 can read"),
        ("{{ messages[9].content + 1 }}", "no element 9"),
        ("{% include 'other' %}", "no loader"),
    ],
)
def test_a_template_that_fails_or_does_not_end_is_refused_by_name(
    source: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilegrad.data.sandbox.MAX_LINES", 20_000)
    with pytest.raises(ValueError, match=reason) as caught:
        said(source)
    assert "chat_template.jinja" in str(caught.value)


DOUBLED = (
    "{% set ns = namespace(x=['x'], y='x', l=[]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
)
LARGE = [
    "{{ 'x' * 1000000000 }}",
    "{{ 1000000000 * [1] }}",
    "{{ 2 ** 1000000000 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "{{ '%1000000000d'|format(1) }}",
    *(f"{{{{ 'x'.{name}(1000000000) }}}}" for name in ("ljust", "rjust", "center", "zfill")),
    "{{ '\t'.expandtabs(1000000000) }}",
    "{{ (1).to_bytes(1000000000, 'big') }}",
    "{{ ('x' * 10000).replace('x', 'y' * 10000) }}",
    "{{ ('x' * 10000)|replace('x', 'y' * 10000) }}",
    "{{ ('x' * 10000)|replace(new='y' * 100000, old='x') }}",
    "{{ ('x' * 10000).translate({120: 'y' * 10000}) }}",
    "{{ ('x' * 10000).join(['y'] * 10000) }}",
    "{{ ('x' * 10000).join((['y'] * 1000)|map('string')) }}",
    "{{ (['y'] * 10000)|join('x' * 10000) }}",
    "{{ (['y'] * 1000)|map('string')|join('x' * 10000) }}",
    "{{ (['y' * 10000] * 10000)|join }}",
    "{{ 'x'|center(1000000000) }}",
    "{{ ['x']|map('center', 1000000000)|list }}",
    "{{ 'x'|batch(1000000000, 'y')|list }}",
    "{{ ('x\n' * 10000)|indent(10000) }}",
    "{{ ('x ' * 10000)|wordwrap(1, wrapstring='y' * 10000) }}",
    "{{ ([1] * 10000)|tojson(indent=10000) }}",
    "{% set ns = namespace(y='x') %}{% for i in range(60) %}{% set ns.y = ns.y + ns.y %}{% endfor %}",
    "{% set ns = namespace(y='x') %}{% for i in range(60) %}{% set ns.y = ns.y ~ ns.y %}{% endfor %}",
    "{% set y = 'x' * 10000 %}{% for i in range(9999) %}{{ y }}{% endfor %}",
    "{% for i in range(999) %}" + "x" * 2000 + "{% endfor %}",
    "{% macro m() %}{% for i in range(999) %}" + "x" * 2000 + "{% endfor %}{% endmacro %}{% set y = m() %}",
    "{% set ns = namespace(l=[]) %}{% set y = 'x' * 10000 %}"
    "{% for i in range(9999) %}{% set ns.l = [ns.l, y[1:]] %}{% endfor %}",
    "{% set ns = namespace(l=[]) %}{% set y = 'x' * 10000 %}"
    "{% for i in range(9999) %}{% set ns.l = [ns.l, y.upper()] %}{% endfor %}",
]
NESTED = [  # these have so many parts that a smaller limit saves time
    *(
        DOUBLED + end
        for end in ("{{ ns.x }}", "{{ ns }}", "{{ ns.x|string }}", "{{ ns.x|tojson }}", "{{ 'a' ~ ns.x }}")
    ),
    *(DOUBLED + end for end in ("{{ '%s' % (ns.x,) }}", "{{ '{}'.format(ns.x) }}", "{{ {'a': ns.x}.values() }}")),
    "{% set ns = namespace(l=[]) %}{% for i in range(999) %}{% set ns.l = [ns.l" + ", 1" * 200 + "] %}{% endfor %}",
    "{% set ns = namespace(l=[]) %}{% for i in range(999) %}{% set ns.l = (ns.l" + ", 1" * 200 + ") %}{% endfor %}",
    "{% set ns = namespace(l=[]) %}{% for i in range(999) %}{% set ns.l = {0: ns.l"
    + "".join(f", {i}: 1" for i in range(1, 200))
    + "} %}{% endfor %}",
]


@pytest.mark.parametrize(
    ("source", "most"),
    [*((source, 1 << 18) for source in LARGE), *((source, 1 << 14) for source in NESTED)],
    ids=lambda it: it[:60] if isinstance(it, str) else f"{it}",
)
def test_a_template_that_makes_large_values_is_refused_before_they_are_allocated(
    source: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilegrad.data.sandbox.MAX_SIZE", most)
    found = template(source)
    _ = found._compiled
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=rf"makes strings or lists of more than {most:,} characters \(chat_"):
            found.render(TALK)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("filter", ["length", "first|length", "list|length", "map('length')|list|length"])
def test_the_length_of_a_large_nested_value_may_be_taken(filter: str) -> None:
    assert template(DOUBLED + f"{{{{ ns.x|{filter} }}}}").render(TALK).text == "2"


def test_the_limits_of_a_template_are_per_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilegrad.data.sandbox.MAX_SIZE", 1 << 18)
    found = template("{{ 'x' * 100000 }}")
    assert len(found.render(TALK).text) == len(found.render(TALK).text) == 100_000


@pytest.mark.parametrize(
    ("record", "format", "contents"),
    [
        ({"messages": TALK[:2]}, "messages", ["Hi", "Hello"]),
        ({"prompt": "Hi", "completion": "Hello"}, "prompt", ["Hi", "Hello"]),
        ({"prompt": "Hi", "response": "Hello"}, "prompt", ["Hi", "Hello"]),
        ({"prompt": TALK[:1], "completion": TALK[1:2]}, "prompt", ["Hi", "Hello"]),
        ({"instruction": "Add", "input": "1, 2", "output": "3"}, "instruction", ["Add\n\n1, 2", "3"]),
        ({"instruction": "Sing", "output": "la"}, "instruction", ["Sing", "la"]),
        ({"instruction": "Sing", "input": "", "output": "la", "id": 7}, "instruction", ["Sing", "la"]),
    ],
)
def test_every_format_is_detected_and_read(record: dict[str, object], format: str, contents: list[str]) -> None:
    found = detect_format(record)
    assert found == format
    messages = read_messages(record, found)
    assert [message["content"] for message in messages] == contents
    assert [message["role"] for message in messages] == ["user", "assistant"]


def test_a_line_of_text_has_no_format() -> None:
    assert detect_format({"text": "Once"}) is None and detect_format({"prompt": "Hi"}) is None


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"messages": []}, r"messages: got \[\]"),
        ({"messages": "Hi"}, "messages: got 'Hi'"),
        ({"messages": ["Hi"]}, r"messages\[0\]: got 'Hi'"),
        ({"messages": [{"role": 3, "content": "x"}]}, r"messages\[0\]"),
        ({"messages": [{"role": "user", "content": None}]}, r"messages\[0\].content: got None"),
        ({"messages": TALK[:1]}, "no message of the assistant"),
        ({"prompt": 3, "completion": "x"}, "prompt: got 3"),
        ({"instruction": "x", "input": ["y"], "output": "z"}, "input: got"),
        ({"text": "x"}, "got the keys 'text'; accepted: an object with 'messages'"),
    ],
)
def test_a_line_that_is_not_a_conversation_is_refused_by_its_field(record: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_messages(record, detect_format(record) or "messages")


def test_without_a_template_the_text_is_prompt_completion_and_eos() -> None:
    found = plain_conversation(read_messages({"prompt": "2 + 2 =", "completion": " 4"}, "prompt"), "prompt", "</s>")
    assert (found.text, found.spans) == ("2 + 2 = 4</s>", ((7, 13),))
    with pytest.raises(ValueError, match="got no chat template"):
        plain_conversation(TALK, "messages", "</s>")


def test_tokens_after_the_end_of_a_turn_are_not_targets() -> None:
    found = template(CHATML).conversation(TALK[:2])
    text = found.text
    starts = np.array(
        [text.index("<|im_start|>assistant"), text.index("\nHello"), text.rindex("<|im_end|>"), len(text) - 1]
    )
    ends = np.append(starts[1:], len(text))
    special = np.array([True, False, True, False])
    assert trained_tokens(found, Encoded(starts, starts, ends, special)).tolist() == [False, True, True, False]
    assert trained_tokens(found, Encoded(starts, starts, ends, np.zeros(4, np.bool_))).tolist() == [
        False,
        True,
        True,
        True,
    ]


@pytest.mark.parametrize("home", ["chat_template.jinja", "tokenizer_config.json", "a list"])
def test_the_template_of_a_folder_is_found(home: str, tmp_path: Path) -> None:
    settings: dict[str, object] = {"eos_token": {"content": "</s>"}, "bos_token": "<s>", "pad_token": None}
    if home == "chat_template.jinja":
        (tmp_path / home).write_text(MISTRAL, encoding="utf-8")
    elif home == "a list":
        settings["chat_template"] = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": MISTRAL}]
    else:
        settings["chat_template"] = MISTRAL
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    found = load_chat_template(tmp_path)
    assert found is not None and found.source == MISTRAL and found.special_tokens == TOKENS
    assert load_chat_template(tmp_path / "nothing") is None


def test_a_template_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 3}', encoding="utf-8")
    with pytest.raises(ValueError, match="chat_template: got 3"):
        load_chat_template(tmp_path)
