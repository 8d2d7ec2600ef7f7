"""The import graph is the architecture; this file is its only statement that a machine reads."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "tilegrad"
MAY_IMPORT: dict[str, set[str]] = {  # package or module → those of ours it may import
    "memory": set(),
    "kernels": set(),
    "table": set(),
    "functional": {"kernels"},
    "model": {"kernels", "memory"},
    "dist": {"memory"},
    "train": {"model", "kernels", "memory", "dist"},
    "plain": {"model"},
    "gradcheck": {"kernels", "model", "memory", "train", "plain", "table"},
    "check": {"functional", "kernels", "table"},
    "bench": {"kernels", "model", "memory", "train", "functional", "plain", "table"},
    "progress": {"memory", "table"},
    "doctor": {"kernels"},
    "cli": {
        "model",
        "train",
        "gradcheck",
        "check",
        "bench",
        "memory",
        "kernels",
        "functional",
        "table",
        "progress",
        "doctor",
    },
}
FREE = {"__init__", "__main__"}  # the front door: names of everything, loaded on first use
STANDARD_LIBRARY_ONLY = {"memory/plan.py"}


def _modules(path: Path, root: Path) -> set[str]:
    """Dotted names that `path` imports, relative ones resolved; lazily or not, for typing or not."""
    package = ["tilegrad", *path.relative_to(root).parent.parts]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *((node.module or "").split(".") if node.module else [])])
            found |= {module} if module.count(".") else {f"{module}.{alias.name}" for alias in node.names}
    return found


def violations(root: Path) -> list[str]:
    out = []
    for path in sorted(root.rglob("*.py")):
        here = path.relative_to(root)
        part = here.parts[0].removesuffix(".py")
        modules = _modules(path, root)
        if str(here) in STANDARD_LIBRARY_ONLY:
            foreign = {m.split(".")[0] for m in modules} - sys.stdlib_module_names
            out += [f"{here} imports {name}; it may import the standard library only" for name in sorted(foreign)]
        if part in FREE:
            continue
        if part not in MAY_IMPORT:
            out.append(f"{here}: {part} has no row in MAY_IMPORT")
            continue
        ours = {m.split(".")[1] for m in modules if m.startswith("tilegrad.")} - {part, "__version__"}
        out += [
            f"{here} imports tilegrad.{other}; {part} may import {sorted(MAY_IMPORT[part]) or 'nothing of ours'}"
            for other in sorted(ours - MAY_IMPORT[part])
        ]
    return out


def test_imports_point_one_way() -> None:
    assert not violations(ROOT), "\n".join(violations(ROOT))


@pytest.mark.parametrize(
    "line",
    [
        "from tilegrad.memory import plan",
        "from tilegrad import memory",
        "import tilegrad.memory.plan",
        "from ..memory import plan",
        "from .. import memory",
        "from ...memory.plan import Plan",
    ],
)
def test_canary_an_arrow_the_wrong_way_is_seen(tmp_path: Path, line: str) -> None:
    deep = line.startswith("from ...")
    file = tmp_path / "kernels" / ("attention/tiled.py" if deep else "dispatch.py")
    file.parent.mkdir(parents=True)
    file.write_text(f"def f():\n    {line}\n")
    assert violations(tmp_path) == [
        f"{file.relative_to(tmp_path)} imports tilegrad.memory; kernels may import nothing of ours"
    ]


def test_canary_torch_in_the_planner_is_seen(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "plan.py").write_text("import torch\n")
    assert violations(tmp_path) == ["memory/plan.py imports torch; it may import the standard library only"]


def run_python(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT.parent)}
    return subprocess.run(
        [sys.executable, *flags, "-c", code], capture_output=True, text=True, check=True, env=environment
    )


def test_import_loads_no_torch_and_touches_no_gpu() -> None:
    run_python("import tilegrad, sys; assert 'torch' not in sys.modules")
    run_python(
        "import tilegrad, torch\n"
        "tilegrad.attention, tilegrad.Mask, tilegrad.attention_fwd\n"
        "assert not torch.cuda.is_initialized()"
    )


def test_own_modules_import_in_a_fifth_of_a_second() -> None:
    """Everything that the public names and the command line load; a GPU's kernels are loaded when one is used."""
    loaded = (
        "import sys, tilegrad, tilegrad.cli\nfor name in tilegrad.__all__: getattr(tilegrad, name)\nprint(*sys.modules)"
    )
    names = [name for name in run_python(loaded).stdout.split() if name.startswith("tilegrad")]
    assert len(names) > 30
    best = float("inf")
    for _ in range(8):  # the best of a few: a busy machine is not a slow import
        lines = run_python("import torch\n" + "\n".join(f"import {n}" for n in names), "-X", "importtime").stderr
        own = [int(t) for t in re.findall(r"import time:\s+(\d+) \|\s+\d+ \|\s+tilegrad", lines)]
        assert len(own) >= len(names), "every module of ours was timed"
        best = min(best, sum(own))
        if best < 200_000:
            break
    assert best < 200_000, f"{best / 1000:.0f} ms"
