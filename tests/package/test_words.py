"""Words that docs/glossary.md does not use stay out of the source: those that have no other meaning there."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2]
SOURCES = sorted((HERE / "src" / "tilegrad").rglob("*.py"))
ANYWHERE = re.compile(  # in code, docstrings and comments; -ffp-contract is the compiler's
    r"\b(walk(s|ed|ing)?|(?<!-ffp-)contracts?|rings?|crossed|limbo|carver|durabl[ey]|rowwise|weigh(s|ed)?|loaders?)\b",
    re.IGNORECASE,
)
NAMES = {"half", "sees", "lane", "lanes", "LANES"}  # fine words, but not for a variable
OF_TORCH = {"half_to_float"}  # a keyword of _softmax
NOT_USED = (HERE / "docs" / "glossary.md").read_text(encoding="utf-8").split("## Words not used")[1]


def found(text: str) -> list[str]:
    """`line: word` of each."""
    words = [(text.count("\n", 0, m.start()) + 1, m[0]) for m in ANYWHERE.finditer(text)]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string not in OF_TORCH and NAMES & set(token.string.split("_")):
            words.append((token.start[0], token.string))
    return [f"{line}: {word}" for line, word in sorted(words)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(HERE / "src" / "tilegrad")))
def test_words_not_used(path: Path) -> None:
    assert not found(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "word", ["walk", "contract", "ring", "crossed", "limbo", "carver", "rowwise", "weigh", "loader", "durable"]
)
def test_the_glossary_says_so(word: str) -> None:
    assert ANYWHERE.fullmatch(word) and re.search(rf"\b{word}\b", NOT_USED)


@pytest.mark.parametrize(
    "text", ["walks = 1\n", '"""A Ring of stages."""\n', "x = 1  # its contract\n", "_MAX_LANES = 2\n"]
)
def test_canary_a_word_is_found(text: str) -> None:
    assert len(found(text)) == 1


def test_other_meanings_are_left() -> None:
    assert not found('x = "-ffp-contract=fast"  # half of it, each in turn, as the table sees it: string\n')
