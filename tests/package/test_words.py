"""Words and turns of phrase that docs/glossary.md does not use stay out of src, tests, docs and pages of results."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2]
SOURCES = set((HERE / "src" / "tilegrad").rglob("*.py"))
PROSE = sorted(
    path
    for folder, ends in (("src", "py cpp h"), ("tests", "py cpp"), ("benchmarks", "py md"), ("docs", "py md"))
    for end in ends.split()
    for path in (HERE / folder).rglob(f"*.{end}")
    if path != Path(__file__)
) + [HERE / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "hatch_build.py")]
ANYWHERE = re.compile(  # in code, docstrings and comments; -ffp-contract is the compiler's
    r"\b(walk(s|ed|ing)?|(?<!-ffp-)contracts?|rings?|crossed|limbo|carver|durabl[ey]|rowwise|weigh(s|ed)?|loaders?)\b",
    re.IGNORECASE,
)
NAMES = {"half", "sees", "lane", "lanes", "LANES"}  # fine words, but not for a variable
OF_TORCH = {"half_to_float"}  # a keyword of _softmax
NOT_USED = (HERE / "docs" / "glossary.md").read_text(encoding="utf-8").split("## Words not used")[1]

VERB = r"(?:is|are|was|were|has|have|had|does|do|would|could|can|can't|cannot|may|must|will|needs|always|never|only)"
RELATIVE = r"(?:that|which|who|whose|where|when|in|of|as)"
IN_PROSE = {  # what to say instead → the habit, in comments, strings and pages
    "another beginning": re.compile(r"""(?:^[\s"'#*|>/-]*|[.:!?|]\s+)Of\b"""),
    "next to, besides": re.compile(r"\bbeside\b", re.IGNORECASE),
    "because": re.compile(
        rf", for (?:(?:it|they|we|you|there|nothing|nobody)\b|(?:(?!{RELATIVE}\b)[^\s,.;:]+ ){{1,6}}?{VERB}\b)"
    ),
    "again": re.compile(r"\banew\b", re.IGNORECASE),
    "so, therefore": re.compile(r"\bhence\b", re.IGNORECASE),
    "continues, resumes": re.compile(r"\bgo(?:es)? on\b"),
    "is, has the address": re.compile(r"\blies\b"),
    "is": re.compile(r"\bstands\b"),
    "got, given": re.compile(r"\btold\b"),
    "instead of": re.compile(r"\bin the place of\b"),
    "in flight, running": re.compile(r"\bunder way\b"),
    "not any more": re.compile(r"\bno more[.,;:)]"),
    "of the rest, of the other …": re.compile(r"\bof others\b|\beach its own\b"),
    "after, next": re.compile(r"(?<!\bis )(?<!\bare )(?<!\bbe )(?<!\bstays )(?<!\bleft )\bbehind\b"),
}
HEADLESS = re.compile(r"\S.*  (?:#|//) of\b")  # a comment after code that begins with "of": of which noun?
HEADED = ("src/", "benchmarks/")
ACCEPTS_NOTHING = re.compile(r"accepted:\s*(?:[;)]|$)")
IN_RESULTS = {
    "run": re.compile(r"\bleases?\b", re.IGNORECASE),
    "goal": re.compile(r"\bbars?\b|\basked was\b", re.IGNORECASE),
    "the run ended before": re.compile(r"\bcut off\b|\brun was over\b"),
}
COMMENT_OR_STRING = re.compile(  # tokenize finds the same ones in twenty times the time
    r"""#[^\n]*|\"{3}(?:[^\\]|\\.)*?\"{3}|'{3}(?:[^\\]|\\.)*?'{3}|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'""", re.DOTALL
)
NAME = re.compile(r"\w+")
CODE_IN_PAGES = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
NAME_IN_PROSE = re.compile(r"`[^`\n]*`")

# How many finds a file may have: the key "beside" of `plan --json`, which programs read.
STILL = {"src/tilegrad/memory/planned/report.py": 1}


def found(text: str) -> list[str]:
    """`line: word` of each."""
    code = COMMENT_OR_STRING.sub(lambda found: "\n" * found[0].count("\n"), text)
    names = (m for m in NAME.finditer(code) if m[0] not in OF_TORCH and NAMES & set(m[0].split("_")))
    words = [(code.count("\n", 0, m.start()) + 1, m[0]) for m in names]
    words += [(text.count("\n", 0, m.start()) + 1, m[0]) for m in ANYWHERE.finditer(text)]
    return [f"{line}: {word}" for line, word in sorted(words)]


def prose(text: str, kind: str) -> Iterator[tuple[int, str]]:
    """The lines that people read, with their numbers: of a page those outside code, of a program comments and strings."""
    if kind == ".md":
        page = CODE_IN_PAGES.sub(lambda code: "\n" * code[0].count("\n"), text.split("## Words not used")[0])
        yield from enumerate(page.split("\n"), 1)
    elif kind == ".py":
        number, seen = 1, 0
        for piece in COMMENT_OR_STRING.finditer(text):
            number, seen = number + text.count("\n", seen, piece.start()), piece.start()
            yield from enumerate(piece[0].split("\n"), number)
    else:
        for number, line in enumerate(text.split("\n"), 1):
            yield number, line.partition("//")[2]


def habits(text: str, kind: str, *, results: bool = False) -> list[str]:
    """`line: what was found; say …` of each."""
    patterns = IN_PROSE | (IN_RESULTS if results else {})
    return [
        f"{number}: {match[0].strip()!r}; say: {instead}"
        for number, line in prose(text, kind)
        for instead, pattern in patterns.items()
        for match in pattern.finditer(NAME_IN_PROSE.sub("`", line))
    ]


def without_a_value(node: ast.AST) -> Iterator[int]:
    """The lines of the strings in which no value follows "accepted:". A value in an f-string counts as a word."""
    if isinstance(node, ast.JoinedStr | ast.Constant):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        if ACCEPTS_NOTHING.search(
            "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in parts)
        ):
            yield node.lineno
    else:
        for child in ast.iter_child_nodes(node):
            yield from without_a_value(child)


def test_words_and_habits() -> None:
    """One test for all files: there are 600, and each takes milliseconds."""
    wrong = {}
    for path in PROSE:
        name = str(path.relative_to(HERE))
        text, results = path.read_text(encoding="utf-8"), path.parent.name == "benchmarks" and path.suffix == ".md"
        there = habits(text, path.suffix, results=results)
        there = there if len(there) > STILL.get(name, 0) else []
        if path in SOURCES:
            there += found(text)
            if "accepted:" in text:
                there += [f"{line}: no value after 'accepted:'" for line in without_a_value(ast.parse(text))]
        if there:
            wrong[name] = there
    assert not wrong
    assert set(PROSE) >= SOURCES


def headless(text: str) -> list[int]:
    return [number for number, line in enumerate(text.split("\n"), 1) if HEADLESS.search(line)]


def test_a_comment_after_code_names_its_noun() -> None:
    wrong = {}
    for path in PROSE:
        name = path.relative_to(HERE).as_posix()
        if name.startswith(HEADED):
            there = headless(path.read_text(encoding="utf-8"))
            if there:
                wrong[name] = there
    assert not wrong


def test_canary_a_comment_without_its_noun_is_found() -> None:
    assert headless("TILE = 1  # of a tile\nint n;  // of a column\n") == [1, 2]
    assert not headless("TILE = 1  # rows of a tile\n# rows and columns\n# of a tile\n")


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


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (".py", '"""Of one rank nothing is sent."""\n'),
        (".py", "x = 1  # it rounds. Of float64 the oracle rounds too\n"),
        (".md", "| a | Of each op |\n"),
        (".md", "Kept, for it is\nread again.\n"),
        (".md", "It has none, for the factor is in both.\n"),
        (".py", '"""What lies there is made\nagain."""\n'),
        (".cpp", "int x;  // drawn anew\n"),
        (".py", "raise ValueError(f'{x}: what is told')\n"),
        (".md", "beside\n"),
        (".py", "x = 1  # read in the place of y, and needed no longer\n"),
        (".md", "One step is under way.\n"),
        (".md", "It needs the folder no more.\n"),
        (".py", '"""The kernel behind the loss."""\n'),
        (".py", "x = 1  # a copy of others\n"),
    ],
)
def test_canary_a_habit_is_found(kind: str, text: str) -> None:
    assert len(habits(text, kind)) == 1


@pytest.mark.parametrize(
    "text", ['f"{x}: got 1; accepted:"', '"x: got 1; accepted: ; give y"', 'f"{x}: got" "1; accepted: "']
)
def test_canary_an_error_without_a_value_is_found(text: str) -> None:
    assert list(without_a_value(ast.parse(text))) == [1]
    assert not list(without_a_value(ast.parse(text.replace("accepted:", "accepted: a name"))))


def test_canary_results_speak_to_readers() -> None:
    assert len(habits("In one lease, 1.05 (bar 1.02).\n", ".md", results=True)) == 2
    assert len(habits("It was cut off: the run was over.\n", ".md", results=True)) == 2


def test_what_is_no_habit_is_left() -> None:
    assert not habits("told = [x for x in y, for z]  # of it, for comparisons, and beneath\n", ".py")
    assert not habits("Kept, for example, for text whose order is time; `beside`.\n```\nbeside\n```\n", ".md")
    assert not habits("int beside, told;  // next to it\n", ".cpp")
    assert not habits("Rank 1 is behind; there are no more than two.\n", ".md")
