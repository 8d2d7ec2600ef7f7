"""Mutants: copies of the code with one small change, and whether tests see it.  ./tg mutants [--sample N] [--seed N] [--all]

A mutant swaps one operator or moves one number: Python (Triton's kernels too) at the nodes of its syntax tree, C++ by text.

    1  the tests of the files concerned run once in a copy of the tree: which pass, how long each takes, what it calls
    2  each mutant runs in a copy against the tests that call its function, the most specific first, until one fails. If
       none calls it, against those that call its file, then against those of its folder in TESTS
    3  a mutant has survived if all tests pass and is unknown if they take longer than --seconds; code that C++'s compiler
       refuses is not a mutant

A worker is a process that has torch and pytest loaded; a run of tests is a fork of it.

With --gpu the mutants are only those of Triton and Hopper, and their tests those with the mark gpu (GPU_TESTS) in the order
of their file. A kernel may wait for ever: a run that writes nothing for QUIET_SECONDS is ended, and its mutant killed.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "src/tilegrad"
ATTENTION = "tests/attention/test_"
FRONT = tuple(f"{ATTENTION}{name}.py" for name in ("eager", "functional", "transforms", "sdpa"))
TESTS = {  # the longest matching prefix of a path decides
    "kernels/attention/": (
        *(f"{ATTENTION}{name}.py" for name in ("tiled", "reference", "bounds", "checks", "functional", "context")),
        *(f"{ATTENTION}{name}.py" for name in ("mask", "problem")),
        "tests/ops/test_workspaces.py",
    ),
    "kernels/attention/triton/": (f"{ATTENTION}triton.py", f"{ATTENTION}triton_compile.py"),
    "kernels/attention/hopper/": tuple(f"{ATTENTION}hopper{name}.py" for name in ("_fwd", "_bwd", "")),
    "kernels/attention/cpu.py": (f"{ATTENTION}native.py",),
    "kernels/attention/table.py": tuple(f"{ATTENTION}{name}.py" for name in ("hopper", "functional", "native")),
    "kernels/cpu/": (
        f"{ATTENTION}native.py",
        *(f"tests/ops/test_ops_{name}.py" for name in ("norm", "activation", "cache_attention")),
    ),
    "kernels/cuda_launch.py": (f"{ATTENTION}cuda_launch.py",),
    "kernels/rope/": ("tests/ops/test_ops_activation.py", "tests/model/test_model.py", "tests/model/test_families.py"),
    "kernels/sampling/": ("tests/ops/test_ops_sampling.py",),
    "kernels/cpu/csrc/rows/sampling": ("tests/ops/test_ops_sampling.py",),
    "kernels/": ("tests/ops", f"{ATTENTION}philox.py"),
    "memory/managed/": ("tests/memory", "tests/bench/test_bench_memory.py", "tests/attacks/test_attack_memory.py"),
    "memory/managed/hit": (
        "tests/memory/test_hit.py",
        "tests/memory/test_manager.py",
        "tests/package/test_native_module.py",
    ),
    "memory/": ("tests/memory", "tests/train/test_engine.py"),
    "model/": ("tests/model", "tests/train/test_engine.py"),
    "engine/": ("tests/train", "tests/model/test_dropout.py"),
    "engine/dist/": ("tests/dist", "tests/train/test_ranks.py", "tests/train/test_engine.py"),
    "engine/sampling.py": ("tests/train/test_sampling.py",),
    "training/": ("tests/train",),
    "data/": ("tests/train",),
    "pretrained/": ("tests/train",),
    "text/": ("tests/train", "tests/package/test_cli.py"),
    "specification/": (
        "tests/model/test_shared_attention.py",
        "tests/memory/test_workspace.py",
        "tests/package/test_cli.py",
    ),
    "training/config.py": ("tests/train", "tests/package/test_cli.py"),
    "training/sections.py": ("tests/train", "tests/package/test_cli.py"),
    "training/api.py": ("tests/train", "tests/package/test_cli.py"),
    "engine/gradcheck.py": ("tests/package/test_gradcheck.py", "tests/package/test_cli.py", "-k", "gradcheck"),
    "functional/": FRONT,
    "native/": ("tests/package/test_native_module.py",),
    "functional/fast_path": (f"{ATTENTION}eager.py", f"{ATTENTION}functional.py"),
    "nn/": (f"{ATTENTION}dilated_modules.py", "tests/integrations/test_torch.py", "tests/package/test_package.py"),
    "functional/dilated/": (f"{ATTENTION}dilated.py", f"{ATTENTION}dilated_modules.py"),
    "integrations/": tuple(f"tests/integrations/test_{name}.py" for name in ("torch", "transformers", "parallel")),
    "cli/": ("tests/package/test_cli.py", "tests/package/test_package.py", "tests/train/test_interrupts.py"),
}
GPU_TESTS = {  # likewise with --gpu; a file …_gpu.py runs its slow tests, one specification each
    "kernels/attention/triton/": (f"{ATTENTION}triton_gpu.py",),
    "kernels/attention/hopper/": (f"{ATTENTION}hopper_gpu.py",),
    "kernels/": ("tests/ops/test_ops_triton.py", "tests/ops/test_ops_cuda.py"),
}
QUIET_SECONDS = 60
AT_ONCE = 2  # tests with the mark gpu that are watched in one process: each compiles for seconds
NO_RESULT = ("kernels/attention/triton/tiles.py",)  # sizes of tiles, which affect speed only
SPEED = {"BLOCK", "CHUNK", "SLAB", "TILE", "MOST_ENTRIES"}  # constants with these names affect speed only
CALLERS = {
    "csrc/attention/": ("attention/cpu.py",),
    "csrc/rows/sampling": ("sampling/cpu.py",),
    "csrc/gemm/": ("linear/cpu.py", "linear/fixed_order.py"),
    "csrc/rows/": ("cpu/rows.py",),
    "csrc/": ("attention/cpu.py", "cpu/rows.py"),
    "cpu/abi.py": ("attention/cpu.py", "cpu/rows.py"),
}
LIBRARIES = {  # the C++ libraries: the module that builds each, and its file
    "kernels/cpu/csrc/": ("from tilegrad.native import build as it", "kernels/cpu/native_*.so"),
    "functional/": ("from tilegrad.functional.fast_path import MODULE as it", "functional/tilegrad_fast_path_*.so"),
    "memory/managed/": ("from tilegrad.memory.managed.hit import MODULE as it", "memory/managed/tilegrad_hit_*.so"),
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
    """One mutant for each operator, comparison and number (an integer becomes n + 1, another number 2 x). None in annotations,
    messages, default arguments, the constants of SPEED, or zip's strict: lengths are equal wherever the code is right."""
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
            put(start(node), end(node), _moved(node.value), node.lineno)
    return found


def _moved(number: float) -> str:
    if isinstance(number, bool):
        return str(not number)
    return repr(number + 1 if isinstance(number, int) or not number else 2 * number)


def _mutable(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "defaults", "kw_defaults"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _left_out(child):
                yield from _mutable(child)


def _left_out(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Name) and target.id in SPEED for target in node.targets)
    if isinstance(node, ast.keyword):
        return node.arg == "strict"
    return isinstance(node, (ast.JoinedStr, ast.Raise, ast.Assert))


def of_cpp(path: str, source: str) -> list[Mutant]:
    """One mutant for each operator with a blank on both sides, in code."""
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


def suite_of(path: str, *, gpu: bool = False) -> tuple[str, ...] | None:
    inner, tests = path.removeprefix(f"{PACKAGE}/"), GPU_TESTS if gpu else TESTS
    beginnings = [start for start in tests if inner.startswith(start)]
    return tests[max(beginnings, key=len)] if beginnings else None


def all_mutants(root: Path = ROOT) -> list[Mutant]:
    found: list[Mutant] = []
    for file in sorted((root / PACKAGE).rglob("*")):
        path = file.relative_to(root).as_posix()
        if file.suffix in (".py", ".cpp", ".h") and suite_of(path) and not path.endswith(NO_RESULT):
            found += (of_python if file.suffix == ".py" else of_cpp)(path, file.read_text(encoding="utf-8"))
    return found


class Watched(NamedTuple):
    name: str
    interpreted: bool
    seconds: float
    called: frozenset[str]


class Verdict(NamedTuple):
    mutant: Mutant
    verdict: str  # killed, survived, unknown, refused
    by: str
    tests: int
    cut: bool
    seconds: float


class Tree:
    """A copy of the checkout, or of another tree, and the process whose forks run its tests."""

    def __init__(self, folder: Path, *, gpu: bool = False, like: Tree | None = None) -> None:
        self.root, self.scratch, self.gpu = folder / "tree", folder / "scratch", gpu
        self.scratch.mkdir(parents=True)
        if like:
            shutil.copytree(like.root, self.root)
        else:
            ignored = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", ".*_cache")
            shutil.copytree(ROOT, self.root, ignore=ignored)
            compileall.compile_dir(str(self.root / "src"), quiet=2)
        environment = os.environ | {"PYTHONPATH": f"{self.root}/src:{self.root}/tests", "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"OMP_NUM_THREADS": "1"} | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})
        self.server = subprocess.Popen(
            [sys.executable, str(self.root / "tests/mutants.py"), "--serve"],
            cwd=self.root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def pytest(
        self, arguments: Sequence[str], seconds: float, environment: dict[str, str] | None = None, quiet: float = 3600
    ) -> tuple[int, str]:
        """(exit code, output of pytest). The code is 124 if it ran too long, or wrote nothing for too long."""
        log = self.scratch / "log"
        order = {"arguments": list(arguments), "seconds": seconds, "environment": environment or {}, "log": str(log)}
        order["quiet"] = quiet
        assert self.server.stdin is not None and self.server.stdout is not None
        self.server.stdin.write(json.dumps(order) + "\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline()), log.read_text(errors="replace", encoding="utf-8")

    def close(self) -> None:
        self.server.terminate()
        self.server.communicate()


def serve() -> None:
    """Runs pytest in a fork for each line of JSON on stdin; writes its exit code. SIGTERM ends the fork with its server."""
    import numpy  # noqa: F401
    import pytest
    import torch  # noqa: F401

    out = os.dup(1)
    running: list[int] = []

    def end(*_: object) -> None:
        for child in running:
            os.killpg(child, signal.SIGKILL)
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        child = os.fork()
        if not child:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            log = os.open(order["log"], os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.update(order["environment"])
            code = int(pytest.main([*order["arguments"]]))
            sys.stdout.flush()
            os._exit(code)
        running[:] = [child]
        code = _wait(child, order["seconds"], Path(order["log"]), order["quiet"])
        running.clear()
        os.write(out, f"{code}\n".encode())


def _wait(child: int, seconds: float, log: Path, quiet: float) -> int:
    """The exit code of a child; 124 if it runs longer than `seconds`, or writes nothing into its log for `quiet` seconds."""
    ends, written = time.monotonic() + seconds, time.time()
    while time.monotonic() < ends and time.time() < written + quiet:
        written = max(written, log.stat().st_mtime if log.exists() else written)
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 124


QUIET = (
    "-q",
    "-x",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "-p",
    "support.called",
    "--tb=line",
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
)
NUMPYS = ("-W", "ignore::DeprecationWarning", "-W", "ignore::RuntimeWarning")  # in the interpreter
INTERPRETED = {"TRITON_INTERPRET": "1"}
UNTRACED = {"UNTRACED": "1"}  # Triton's compiler would take minutes, and its kernels are no calls of Python
TIMED = ("test_a_pair_costs", "test_the_report_has_every_case", "faster", "overhead")  # a busy machine fails these


def files_of(suites: Iterable[tuple[str, ...]]) -> list[str]:
    named = [ROOT / name for suite in suites for name in suite if name.startswith("tests")]
    files = {file for name in named for file in (name.rglob("test_*.py") if name.is_dir() else [name])}
    return sorted(file.relative_to(ROOT).as_posix() for file in files)


def watch(
    tree: Tree, file: str, *, interpreted: str = "", picked: Sequence[str] = ()
) -> tuple[list[Watched], list[str]]:
    """The tests of a file that pass, and the names of those that do not. `interpreted`, as pytest's -k,
    selects the tests that run in Triton's interpreter; `picked` names the only ones to run."""
    called = tree.scratch / "called.json"
    called.unlink(missing_ok=True)
    quiet = [argument for argument in QUIET if argument != "-x"]
    more = [*NUMPYS, "-k", interpreted] if interpreted else on_the_gpu(file) if tree.gpu else []
    environment = {"CALLED": str(called)} | (INTERPRETED if interpreted else {}) | (UNTRACED if tree.gpu else {})
    if picked:
        names = tree.scratch / "picked"
        names.write_text("\n".join(picked), encoding="utf-8")
        environment["PICKED"] = str(names)
    code, log = tree.pytest([*quiet, *more, file], 3600, environment)
    if code not in (0, 1, 5):
        raise RuntimeError(f"{file}: pytest's exit code {code}\n{log[-2000:]}")
    found: dict[str, tuple[bool, float, list[str]]] = json.loads(called.read_text(encoding="utf-8"))
    kept = {name: it for name, it in found.items() if not any(part in name for part in (*TIMED, "in_the_interpreter"))}
    passed = [Watched(name, bool(interpreted), s, frozenset(called)) for name, (ok, s, called) in kept.items() if ok]
    return passed, [name for name, (ok, _, _) in kept.items() if not ok]


def interpreted_of(file: str) -> str:
    """The argument of pytest's -k for the tests of a file that need Triton's interpreter; "" if there are none."""
    return "interpreted" if "in_the_interpreter" in (ROOT / file).read_text(encoding="utf-8") else ""


def on_the_gpu(file: str) -> list[str]:
    return ["-m", "gpu", *(["--slow"] if file.endswith("_gpu.py") else [])]


def gpu_tests_of(tree: Tree, file: str) -> list[str]:
    """The names of a file's tests with the mark gpu."""
    code, log = tree.pytest(["--collect-only", "-q", "-p", "no:cacheprovider", *on_the_gpu(file), file], 300)
    if code not in (0, 5):
        raise RuntimeError(f"{file}: pytest's exit code {code}\n{log[-2000:]}")
    return [line for line in log.splitlines() if line.startswith(f"{file}::")]


def function_of(mutant: Mutant) -> str | None:
    """path:line of the innermost function around a mutant, as its code names it; None at a module's or class's level."""
    if not mutant.path.endswith(".py"):
        return None
    best: tuple[int, int] | None = None
    for node in ast.walk(ast.parse((ROOT / mutant.path).read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
            first = min([node.lineno, *(one.lineno for one in decorators)])
            inside = first <= mutant.line <= (node.end_lineno or 0)
            if inside and (best is None or (node.end_lineno or 0) - first <= best[1]):
                best = (first, (node.end_lineno or 0) - first)
    return None if best is None else f"{mutant.path}:{best[0]}"


def picked_for(
    mutant: Mutant, tests: Sequence[Watched], most_seconds: float, *, gpu: bool = False
) -> tuple[list[Watched], bool]:
    """The tests to run, the most specific first (they call the fewest functions), and whether the time cut some off. C++ is
    called through the files in CALLERS, and its random tests come first: they see the most. For a GPU's kernel these
    are the tests that call its file's Python, in the order of their file: the first specifications cover the most."""
    function = function_of(mutant)
    fit = [test for test in tests if function in test.called]
    if not fit:
        callers = next((files for part, files in CALLERS.items() if part in mutant.path), (mutant.path,))
        fit = [test for test in tests if any(name.split(":")[0].endswith(callers) for name in test.called)]
    cpp = not mutant.path.endswith(".py")
    if not fit or (function is None and not cpp):  # a constant is read by tests that call nothing of its file
        files = set(files_of([suite_of(mutant.path, gpu=gpu) or ()]))
        fit += [test for test in tests if test not in fit and test.name.split("::")[0] in files]
    if not gpu:
        fit.sort(key=lambda test: (cpp and "random" not in test.name, len(test.called), test.seconds))
    taken: list[Watched] = []
    for test in fit:
        if sum(one.seconds for one in (*taken, test)) <= most_seconds:
            taken.append(test)
    return taken, len(taken) < len(fit)


def judge(tree: Tree, mutant: Mutant, tests: Sequence[Watched], most_seconds: float) -> Verdict:
    """Runs the tests of a mutant in its tree, which is afterwards as it was."""
    began = time.monotonic()
    taken, cut = picked_for(mutant, tests, most_seconds, gpu=tree.gpu)
    file = tree.root / mutant.path
    builder, built = next((both for part, both in LIBRARIES.items() if part in mutant.path), ("", ""))
    library = next((tree.root / PACKAGE).glob(built), None) if built else None
    kept, when = file.read_bytes(), file.stat().st_mtime_ns
    cpp = not mutant.path.endswith(".py")
    kept_library = library.read_bytes() if library and cpp else None

    def verdict(which: str, by: str) -> Verdict:
        return Verdict(mutant, which, by, len(taken), cut, time.monotonic() - began)

    try:
        file.write_text(mutant.source, encoding="utf-8")
        if cpp:
            build = [sys.executable, "-c", f"{builder}; it.build()"]
            source = os.environ | {"PYTHONPATH": str(tree.root / "src")}
            if subprocess.run(build, env=source, capture_output=True, check=False).returncode:
                return verdict("refused", "the compiler")
        for interpreted in (False, True):
            mine = [test for test in taken if test.interpreted is interpreted]
            if mine:
                picked = tree.scratch / "picked"
                picked.write_text("\n".join(test.name for test in mine), encoding="utf-8")
                files = sorted({test.name.split("::")[0] for test in mine})
                seconds = 30 + 4 * sum(test.seconds for test in mine)
                more = NUMPYS if interpreted else on_the_gpu(files[0]) if tree.gpu else ()
                environment = {"PICKED": str(picked)} | (INTERPRETED if interpreted else {})
                quiet = QUIET_SECONDS if tree.gpu else seconds
                code, log = tree.pytest([*QUIET, *more, *files], seconds, environment, quiet)
                if code == 124:
                    return verdict("killed", "the clock")
                if code != 0:
                    lines = [line for line in log.splitlines() if line.startswith(("FAILED", "ERROR"))]
                    return verdict("killed", lines[0][:200] if lines else f"exit {code}: {log[-200:]}")
        return verdict("unknown" if cut else "survived", "")
    finally:
        file.write_bytes(kept)
        os.utime(file, ns=(when, when))
        if library and kept_library is not None:
            library.write_bytes(kept_library)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./tg mutants", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sample", type=int, default=40, help="how many, drawn at random (40)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all", action="store_true", help="every one: a day on two cores")
    parser.add_argument("--only", action="append", default=[], help="of paths that contain this; may be repeated")
    parser.add_argument("--skip", action="append", default=[], help="none of paths that contain this; may be repeated")
    parser.add_argument(
        "--skip-tests", action="append", default=[], help="no test files whose path contains this; likewise"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes (2)")
    parser.add_argument("--minutes", type=float, default=1e6, help="start none after so many")
    parser.add_argument(
        "--seconds", type=float, default=60, help="of tests for each at most, as they take unchanged (60)"
    )
    parser.add_argument(
        "--no-interpreter", action="store_true", help="where Triton's does not work: numpy 2.3 and later"
    )
    parser.add_argument("--gpu", action="store_true", help="Triton's and Hopper's, by the tests that need a GPU")
    parser.add_argument("--tests", type=Path, help="a file to keep what step 1 found; read where it is there")
    parser.add_argument("--verdicts", type=Path, help="a file for verdicts as JSON lines; those in it are kept")
    given = parser.parse_args(arguments)
    ends = time.monotonic() + 60 * given.minutes
    mutants = [m for m in all_mutants() if not given.only or any(part in m.path for part in given.only)]
    mutants = [m for m in mutants if not any(part in m.path for part in given.skip)]
    mutants = [m for m in mutants if not given.gpu or any(part in m.path for part in ("triton", "hopper"))]
    drawn = mutants if given.all else random.Random(given.seed).sample(mutants, min(given.sample, len(mutants)))
    drawn = _not_judged(drawn, given.verdicts)
    print(f"{len(drawn)} of {len(mutants)} mutants, seed {given.seed}", flush=True)
    verdicts: list[Verdict] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exiting closes the trees
    with tempfile.TemporaryDirectory() as folder:
        trees = [Tree(Path(folder) / "0", gpu=given.gpu)]
        try:
            trees += [Tree(Path(folder) / str(n), gpu=given.gpu, like=trees[0]) for n in range(1, given.workers)]
            files = files_of({suite_of(m.path, gpu=given.gpu) or () for m in drawn})
            files = [file for file in files if not any(part in file for part in given.skip_tests)]
            tests = _watch_all(trees, files, given.tests, interpreter=not given.no_interpreter)
            for mutant, verdict in _each(trees, drawn, lambda t, m: judge(t, m, tests, given.seconds), ends):
                verdicts.append(verdict)
                _print(verdict, given.verdicts)
                del mutant
        finally:
            for tree in trees:
                tree.close()
    counts = Counter(verdict.verdict for verdict in verdicts)
    judged = counts["killed"] + counts["survived"]
    share = counts["killed"] / max(1, judged)
    spread = (share * (1 - share) / max(1, judged)) ** 0.5
    print(
        f"{counts['killed']} of {judged} killed: {share:.1%} ± {2 * spread:.1%} (two standard deviations of the sample)"
    )
    return 1 if counts["survived"] else 0


def _not_judged(mutants: Sequence[Mutant], verdicts: Path | None) -> list[Mutant]:
    rows = map(json.loads, verdicts.read_text(encoding="utf-8").splitlines()) if verdicts and verdicts.exists() else ()
    judged = Counter((row["path"], row["line"], row["change"]) for row in rows)
    left = []
    for mutant in mutants:
        if judged[mutant[:3]]:
            judged[mutant[:3]] -= 1
        else:
            left.append(mutant)
    return left


def _print(verdict: Verdict, to: Path | None) -> None:
    mutant = verdict.mutant
    word = "SURVIVED" if verdict.verdict == "survived" else f"{verdict.verdict:8}"
    seen = f"{verdict.tests} tests{', more by time' if verdict.cut else ''}, {verdict.seconds:.0f} s"
    print(f"{word}  {mutant.path}:{mutant.line}  {mutant.change}  ({seen})", flush=True)
    if to:
        row = mutant._asdict() | verdict._asdict()
        del row["source"], row["mutant"]
        with to.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")


def _watch_all(trees: Sequence[Tree], files: list[str], kept: Path | None, *, interpreter: bool) -> list[Watched]:
    """The results of step 1. `kept` has {watched files: (tests that pass, names of the rest)} and is written each time."""
    wanted: list[tuple[str, str, tuple[str, ...]]] = [(file, "", ()) for file in files]
    if trees[0].gpu:
        names = {file: gpu_tests_of(trees[0], file) for file in files}
        wanted = [
            (file, "", tuple(names[file][n : n + AT_ONCE]))
            for file in files
            for n in range(0, len(names[file]), AT_ONCE)
        ]
    elif interpreter:
        wanted += [(file, interpreted_of(file), ()) for file in files if interpreted_of(file)]
    wanted.sort(key=lambda one: -(ROOT / one[0]).stat().st_size)
    began = time.monotonic()
    found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8")) if kept and kept.exists() else {}
    left = [one for one in wanted if json.dumps(one) not in found]
    for one, (passed, others) in _each(
        trees, left, lambda t, w: watch(t, w[0], interpreted=w[1], picked=w[2]), float("inf")
    ):
        found[json.dumps(one)] = [[(*test[:3], sorted(test.called)) for test in passed], others]
        if kept:
            kept.write_text(json.dumps(found), encoding="utf-8")
    both = [found[json.dumps(one)] for one in wanted]
    tests = [
        Watched(name, interp, seconds, frozenset(called)) for rows, _ in both for name, interp, seconds, called in rows
    ]
    red = sum(len(others) for _, others in both)
    print(f"{len(tests)} tests pass unchanged, {time.monotonic() - began:.0f} s; left out: {red} others", flush=True)
    return tests


def _each(trees: Sequence[Tree], items: Iterable[Any], act: Any, ends: float) -> Iterator[tuple[Any, Any]]:
    """Runs act(tree, item) for each item on the first idle tree. None begins after `ends`."""
    left, done = list(reversed(list(items))), queue.Queue[Any]()

    def work(tree: Tree) -> None:
        try:
            while left and time.monotonic() < ends:
                item = left.pop()
                done.put((item, act(tree, item)))
            done.put(None)
        except BaseException as error:
            done.put(error)
            raise

    for tree in trees:
        threading.Thread(target=work, args=(tree,), daemon=True).start()
    working = len(trees)
    while working:
        result = done.get()
        if isinstance(result, BaseException):
            raise result
        if result is None:
            working -= 1
        else:
            yield result


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        sys.exit(main(sys.argv[1:]))
