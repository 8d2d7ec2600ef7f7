"""Mutants: the code with one small change each, and whether its tests see it.      ./tg mutants [--sample N] [--seed N] [--all]

A mutant swaps one operator or moves one number: Python (Triton's kernels too) at the nodes of its syntax tree, C++ by text.
It runs in a copy of the tree, against the tests of its folder in TESTS; one that they pass has survived.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "src/tilegrad"
ATTENTION = "tests/attention/test_"
TESTS = {  # the longest beginning of a path decides
    "kernels/attention/": tuple(f"{ATTENTION}{name}.py" for name in ("tiled", "reference", "checks", "functional")),
    "kernels/attention/triton/": (f"{ATTENTION}triton.py", f"{ATTENTION}triton_compile.py"),
    "kernels/attention/hopper/": tuple(f"{ATTENTION}hopper{name}.py" for name in ("_fwd", "_bwd", "")),
    "kernels/attention/cpu.py": (f"{ATTENTION}native.py",),
    "kernels/cpu/": (f"{ATTENTION}native.py", "tests/ops"),
    "kernels/": ("tests/ops", f"{ATTENTION}philox.py"),
    "memory/managed/": ("tests/memory", "tests/bench/test_bench_memory.py"),
    "memory/": ("tests/memory", "tests/train/test_engine.py"),
    "model/": ("tests/model", "tests/train/test_engine.py"),
    "train/": ("tests/train", "tests/model/test_dropout.py"),
    "gradcheck.py": ("tests/package/test_cli.py", "-k", "gradcheck"),
}
SWAPS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"), ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.And: ("and", "or"), ast.Or: ("or", "and"),
    ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"),
}  # fmt: skip
CPP = {
    " + ": " - ",
    " - ": " + ",
    " * ": " / ",
    " < ": " <= ",
    " <= ": " < ",
    " > ": " >= ",
    " == ": " != ",
    " && ": " || ",
}


class Mutant(NamedTuple):
    path: str
    line: int
    change: str
    source: str


def of_python(path: str, source: str) -> list[Mutant]:
    """One for each operator, comparison and number; none in annotations, messages and default arguments."""
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    data = source.encode()
    found: list[Mutant] = []

    def put(first: int, last: int, text: str, row: int) -> None:
        mutated = (data[:first] + text.encode() + data[last:]).decode()
        before = data[first:last].decode().strip()
        found.append(Mutant(path, row, f"{before} → {text.strip()}", mutated))

    def start(node: ast.expr) -> int:
        return starts[node.lineno - 1] + node.col_offset

    def end(node: ast.expr) -> int:
        return starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)

    def between(left: ast.expr, right: ast.expr, kind: type[ast.AST]) -> None:
        if kind in SWAPS:
            old, new = SWAPS[kind]
            at = data.find(old.encode(), end(left), start(right))
            if at >= 0:
                put(at, at + len(old), new, left.end_lineno or 0)

    for node in _mutable(ast.parse(source)):
        if isinstance(node, ast.BinOp):
            between(node.left, node.right, type(node.op))
        elif isinstance(node, ast.Compare):
            for op, left, right in zip(node.ops, (node.left, *node.comparators), node.comparators, strict=False):
                between(left, right, type(op))
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                between(left, right, type(node.op))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            put(start(node), start(node.operand), "", node.lineno)
        elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            text = str(not node.value) if isinstance(node.value, bool) else repr(node.value + 1)
            put(start(node), end(node), text, node.lineno)
    return found


def _mutable(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "defaults", "kw_defaults"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, (ast.JoinedStr, ast.Raise, ast.Assert)):
                yield from _mutable(child)


def of_cpp(path: str, source: str) -> list[Mutant]:
    """One for each operator with a blank on both sides, in code."""
    found, lines = [], source.splitlines(keepends=True)
    for n, line in enumerate(lines):
        code = line.split("//")[0]
        if code.lstrip().startswith(("#", "*", "/*", "template", "static_assert")):
            continue
        for old, new in CPP.items():
            for match in re.finditer(re.escape(old), code):
                mutated = line[: match.start()] + new + line[match.end() :]
                source_then = "".join((*lines[:n], mutated, *lines[n + 1 :]))
                found.append(Mutant(path, n + 1, f"{old.strip()} → {new.strip()}", source_then))
    return found


def suite_of(path: str) -> tuple[str, ...] | None:
    inner = path.removeprefix(f"{PACKAGE}/")
    beginnings = [start for start in TESTS if inner.startswith(start)]
    return TESTS[max(beginnings, key=len)] if beginnings else None


def all_mutants(root: Path = ROOT) -> list[Mutant]:
    found: list[Mutant] = []
    for file in sorted((root / PACKAGE).rglob("*")):
        path = file.relative_to(root).as_posix()
        if file.suffix in (".py", ".cpp", ".h", ".hpp") and suite_of(path):
            found += (of_python if file.suffix == ".py" else of_cpp)(path, file.read_text())
    return found


def passes(tree: Path, tests: tuple[str, ...], seconds: float) -> bool:
    """A test that hangs has not passed."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(tree / "src")}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return False
    if done.returncode not in (0, 1, 2, 3, 4):
        raise RuntimeError(f"pytest {' '.join(tests)}: exit {done.returncode}\n{done.stdout.decode()[-2000:]}")
    return done.returncode == 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./tg mutants", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sample", type=int, default=12, help="how many, drawn at random (12)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all", action="store_true", help="every one: days")
    parser.add_argument("--only", default="", help="of paths that contain this")
    given = parser.parse_args(arguments)
    mutants = [m for m in all_mutants() if given.only in m.path]
    drawn = mutants if given.all else random.Random(given.seed).sample(mutants, min(given.sample, len(mutants)))
    print(f"{len(drawn)} of {len(mutants)} mutants, seed {given.seed}", flush=True)
    survivors, seconds = [], {}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, tree, ignore=ignored)
        for mutant in drawn:
            tests = suite_of(mutant.path)
            assert tests is not None
            if tests not in seconds:
                began = time.perf_counter()
                if not passes(tree, tests, 3600):
                    raise RuntimeError(f"{' '.join(tests)}: red before any change")
                seconds[tests] = time.perf_counter() - began
            file = tree / mutant.path
            kept = file.read_text()
            file.write_text(mutant.source)
            survived = passes(tree, tests, 60 + 5 * seconds[tests])
            file.write_text(kept)
            survivors += [mutant] if survived else []
            print(f"{'SURVIVED' if survived else 'killed  '}  {mutant.path}:{mutant.line}  {mutant.change}", flush=True)
    killed = len(drawn) - len(survivors)
    print(f"{killed} of {len(drawn)} killed ({killed / max(1, len(drawn)):.0%})")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
