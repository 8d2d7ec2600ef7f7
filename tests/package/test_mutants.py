"""The mutation runner changes the right places and nothing else."""

from __future__ import annotations

import ast
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from mutants import Mutant, Tree, Watched, all_mutants, function_of, main, of_cpp, of_python, picked_for, suite_of

SOURCE = '''"""A 1 in words."""
BLOCK = 1 << 4
def f(x: int = 3, *, two: bool = True) -> int:
    """2 < 3"""
    if not x or x <= 4 < 9:
        raise ValueError(f"x: got {x + 1}")
    return "é" and x // 2 - y[0] if zip(x, y, strict=True) else x
'''


def test_python_is_changed_one_operator_or_number_at_a_time() -> None:
    found = of_python("m.py", SOURCE)
    assert sorted(m.change for m in found) == sorted(
        ["not → ", "or → and", "<= → <", "< → <=", "4 → 5", "9 → 10", "and → or", "// → *", "- → +", "2 → 3", "0 → 1"]
    )
    for mutant in found:
        ast.parse(mutant.source)
        lines = zip(SOURCE.splitlines(), mutant.source.splitlines(), strict=True)
        assert [n for n, (a, b) in enumerate(lines, 1) if a != b] == [mutant.line]


def test_cpp_is_changed_by_text_and_comments_are_not() -> None:
    source = "#define A 1 + 2\nfor (int i = 0; i < n; ++i) a[i] = b * c;  // x + y\n"
    assert [m.change for m in of_cpp("m.cpp", source)] == ["* → /", "< → <="]
    assert of_cpp("m.cpp", source)[1] == Mutant("m.cpp", 2, "< → <=", source.replace("i < n", "i <= n"))


@pytest.fixture(scope="module")
def every_mutant() -> list[Mutant]:
    return all_mutants()


def test_every_part_that_computes_has_mutants_and_existing_tests(every_mutant: list[Mutant]) -> None:
    found = every_mutant
    folders = {"/".join(m.path.split("/")[2:-1]) for m in found}
    assert folders >= {"kernels/attention", "kernels/attention/triton", "kernels/cpu/csrc", "memory/managed", "model"}
    assert folders >= {"kernels/attention/hopper", "kernels/norm", "memory/planned", "engine", "training"}
    assert folders >= {
        "functional",
        "functional/dilated",
        "nn",
        "engine/dist",
        "integrations",
        "cli",
        "data",
        "pretrained",
    }
    assert any(m.path.endswith("fast_path.cpp") for m in found)
    root = Path(__file__).parents[2]
    for folder in (
        "kernels",
        "memory",
        "model",
        "nn",
        "engine",
        "training",
        "data",
        "functional",
        "integrations",
        "cli",
    ):
        for file in (root / "src/tilegrad" / folder).rglob("*"):
            path = file.relative_to(root).as_posix()
            assert file.suffix not in (".py", ".cpp", ".h") or suite_of(path), path
    for path in {m.path for m in found}:
        named = [name for name in suite_of(path) or () if name.startswith("tests")]
        assert named and all((root / name).exists() for name in named), path


def test_a_mutant_runs_against_the_tests_that_call_its_function(every_mutant: list[Mutant]) -> None:
    mutant = next(m for m in every_mutant if m.path.endswith("managed/slot.py") and "def nbytes" in m.source)
    line = next(n for n, text in enumerate(mutant.source.splitlines(), 1) if "math.prod(self.shape)" in text)
    inside = mutant._replace(line=line)
    function = function_of(inside)
    assert function == f"{mutant.path}:{line - 2}", "the line of the decorator, which is where its code begins"
    assert function_of(mutant._replace(line=1)) is None
    path = mutant.path

    def watched(name: str, seconds: float, *called: str | None) -> Watched:
        return Watched(name, interpreted=False, seconds=seconds, called=frozenset(filter(None, called)))

    broad = watched("tests/memory/test_a.py::broad", 1.0, function, f"{path}:1", f"{path}:2")
    special = watched("tests/memory/test_a.py::special", 2.0, function)
    next_to = watched("tests/memory/test_a.py::next_to", 1.0, f"{path}:7")
    elsewhere = watched("tests/memory/test_plan.py::elsewhere", 1.0, "src/x.py:1")
    tests = [broad, special, next_to, elsewhere]
    assert picked_for(inside, tests, 60) == ([special, broad], False)
    assert picked_for(inside, tests, 2.5) == ([special], True)
    assert picked_for(inside, [next_to, elsewhere], 60) == ([next_to], False)
    assert picked_for(inside, [elsewhere], 60) == ([elsewhere], False)
    assert elsewhere in picked_for(inside._replace(line=1), tests, 60)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("line", "want"), [("assert 1", 0), ("assert 0", 1), ("while True: pass", 124)])
def test_a_fork_runs_the_tests_and_one_that_hangs_is_ended(tmp_path: Path, line: str, want: int) -> None:
    (tmp_path / "test_it.py").write_text(f"def test_it():\n    {line}\n", encoding="utf-8")
    tree = Tree(tmp_path / "work")
    try:
        for quiet in (3600, 5):
            arguments = ["-q", "-p", "no:cacheprovider", str(tmp_path / "test_it.py")]
            assert tree.pytest(arguments, 20 if quiet > 20 else 3600, quiet=quiet)[0] == want
    finally:
        tree.close()


@pytest.mark.slow
def test_closing_a_tree_ends_its_processes(tmp_path: Path) -> None:
    beats = tmp_path / "beats"
    loop = f"while True:\n        open({str(beats)!r}, 'a').write('.')\n        time.sleep(0.1)"
    (tmp_path / "test_it.py").write_text(f"import time\ndef test_it():\n    {loop}\n", encoding="utf-8")
    tree = Tree(tmp_path / "work")
    arguments = ["-q", "-p", "no:cacheprovider", str(tmp_path / "test_it.py")]

    def run() -> None:
        with suppress(ValueError):  # no exit code comes
            tree.pytest(arguments, 20)

    threading.Thread(target=run, daemon=True).start()
    while not beats.exists():
        time.sleep(0.1)
    tree.close()
    time.sleep(0.5)
    before = beats.stat().st_size
    time.sleep(1)
    assert beats.stat().st_size == before


def test_mutants_of_a_gpu_kernel_run_against_its_specifications_in_order(every_mutant: list[Mutant]) -> None:
    found = {m.path.removeprefix("src/tilegrad/kernels/"): m for m in every_mutant}
    names = ("attention/test_hopper_gpu", "attention/test_triton_gpu", "ops/test_ops_cuda")
    tests = [
        Watched(f"tests/{name}.py::test[{n}]", interpreted=False, seconds=9.0 - n, called=frozenset())
        for name in names
        for n in (0, 1, 2)
    ]
    for path, first in (
        ("attention/hopper/forward.py", 0),
        ("attention/triton/forward.py", 3),
        ("rope/triton_ops.py", 6),
    ):
        assert picked_for(found[path], tests, 60, gpu=True) == (tests[first : first + 3], False)
        assert picked_for(found[path], tests, 10, gpu=True) == (tests[first : first + 1], True)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "--sample" in capsys.readouterr().out
