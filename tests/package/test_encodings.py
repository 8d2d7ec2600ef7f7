"""The package and its tests read and write text as UTF-8 in every locale."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def unnamed(source: str) -> Iterator[ast.Call]:
    """Calls that read or write text in the locale's encoding."""
    if not re.search(r"(read_text|write_text|open)\(", source):
        return
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or any(keyword.arg in ("encoding", None) for keyword in node.keywords):
            continue
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in ("read_text", "write_text"):
            if len(node.args) <= (function.attr == "write_text"):
                yield node
        elif isinstance(function, ast.Name) and function.id == "open" or _opens_a_path(function):
            modes = [*node.args[isinstance(function, ast.Name) :], *(k.value for k in node.keywords if k.arg == "mode")]
            mode = modes[0] if modes else ast.Constant("r")
            if isinstance(mode, ast.Constant) and isinstance(mode.value, str) and "b" not in mode.value:
                yield node


def _opens_a_path(function: ast.expr) -> bool:
    """Whether a function is `.open` of an object that is not a module."""
    if not isinstance(function, ast.Attribute) or function.attr != "open":
        return False
    return not (
        isinstance(function.value, ast.Name) and function.value.id in ("os", "gzip", "tarfile", "zipfile", "io")
    )


def test_every_text_file_is_opened_as_utf_8() -> None:
    files = [file for folder in ("src", "tests", "benchmarks") for file in sorted((ROOT / folder).rglob("*.py"))]
    found = [
        f"{file.relative_to(ROOT)}:{call.lineno}"
        for file in files
        for call in unnamed(file.read_text(encoding="utf-8"))
    ]
    assert not found, f'no encoding="utf-8": {", ".join(found)}'


def test_canary_a_call_that_uses_the_locale_is_seen() -> None:
    wrong = [
        "p.read_text()",
        "p.write_text(x)",
        "open(p)",
        "open(p, 'w')",
        "p.open('a')",
        "p.open()",
        "open(p, mode='r')",
    ]
    right = ["p.read_text(encoding=e)", "open(p, 'rb')", "p.open('wb')", "os.open(p, 0)", "p.write_text(x, 'utf-8')"]
    assert [len(list(unnamed(line))) for line in wrong] == [1] * len(wrong)
    assert [len(list(unnamed(line))) for line in right] == [0] * len(right)
