"""The table of allowed imports, which is the architecture, and tests that the package keeps to it."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.forked import python

ROOT = Path(__file__).parents[2] / "src" / "tilegrad"
MAY_IMPORT: dict[
    str, set[str]
] = {  # package or module → those of tilegrad that it may import; the lowest layers come first
    "native": set(),
    "text": set(),
    "memory": {"native"},
    "kernels": {"native"},
    "model": {"kernels", "memory", "text"},
    "functional": {"kernels", "memory", "native"},
    "nn": {"functional", "kernels", "memory"},
    "masks": {"kernels"},
    "integrations": {"functional", "kernels", "masks"},
    "flash": {"integrations"},
    "specification": {"functional", "kernels", "memory", "text"},
    "engine/dist": {"memory"},
    "engine": {"model", "kernels", "memory", "native", "text"},
    "data": {"memory", "model", "text"},
    "pretrained": {"data", "kernels", "memory", "model", "text"},
    "training": {"engine", "data", "pretrained", "model", "kernels", "memory", "text"},
    "bench": {"kernels", "memory", "functional", "model", "engine", "pretrained", "text"},
    "cli": {
        *("bench", "training", "engine", "data", "pretrained", "specification", "functional"),
        *("model", "kernels", "memory", "native", "text"),
    },
}
FREE = {"__init__", "__main__"}  # these modules have public names of all layers, loaded on first use
STANDARD_LIBRARY_ONLY = {"memory/planned/plan.py", "openmp.py"}


_parsed = functools.cache(ast.parse)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """The children of a node that may contain an import. Expressions, which are most nodes, contain none."""
    return (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))


def _modules(path: Path, root: Path) -> set[str]:
    """Dotted names that `path` imports anywhere, also inside functions and for typing. Relative names are resolved."""
    package = ["tilegrad", *path.relative_to(root).parent.parts]
    found = set()
    waiting: list[ast.AST] = [_parsed(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *((node.module or "").split(".") if node.module else [])])
            found |= {module} if module.count(".") else {f"{module}.{alias.name}" for alias in node.names}
        waiting += _statements(node)
    return found


def violations(root: Path) -> list[str]:
    out = []
    for path in sorted(root.rglob("*.py")):
        here = path.relative_to(root)
        part = "/".join(here.parts[:2])
        part = part if part in MAY_IMPORT else here.parts[0].removesuffix(".py")
        own = f"tilegrad.{part.replace('/', '.')}"
        modules = {m for m in _modules(path, root) if not f"{m}.".startswith(f"{own}.")}
        if str(here) in STANDARD_LIBRARY_ONLY:
            foreign = {m.split(".")[0] for m in modules} - sys.stdlib_module_names
            out += [f"{here} imports {name}; it may import the standard library only" for name in sorted(foreign)]
        if part in FREE:
            continue
        if part not in MAY_IMPORT:
            out.append(f"{here}: {part} has no row in MAY_IMPORT")
            continue
        ours = {m.split(".")[1] for m in modules if m.startswith("tilegrad.")} - {"__version__"}
        out += [
            f"{here} imports tilegrad.{other}; {part} may import {sorted(MAY_IMPORT[part]) or 'nothing of ours'}"
            for other in sorted(ours - MAY_IMPORT[part])
        ]
    return out


def test_every_import_is_one_that_the_table_allows() -> None:
    assert not violations(ROOT), "\n".join(violations(ROOT))


@pytest.mark.parametrize(
    "line",
    [
        "from tilegrad.memory.planned import plan",
        "from tilegrad import memory",
        "import tilegrad.memory.planned.plan",
        "from ..memory.planned import plan",
        "from .. import memory",
        "from ...memory.planned.plan import Plan",
    ],
)
def test_canary_an_import_in_the_wrong_direction_is_seen(tmp_path: Path, line: str) -> None:
    deep = line.startswith("from ...")
    file = tmp_path / "kernels" / ("attention/tiled.py" if deep else "op.py")
    file.parent.mkdir(parents=True)
    file.write_text(f"def f():\n    {line}\n", encoding="utf-8")
    assert violations(tmp_path) == [
        f"{file.relative_to(tmp_path)} imports tilegrad.memory; kernels may import ['native']"
    ]


def test_canary_a_part_of_a_package_has_a_row_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "engine" / "dist").mkdir(parents=True)
    (tmp_path / "engine" / "dist" / "units.py").write_text(
        "from ..spec import x\nfrom .mesh import Mesh\n", encoding="utf-8"
    )
    (tmp_path / "engine" / "spec.py").write_text("from .dist.mesh import Mesh\n", encoding="utf-8")
    assert violations(tmp_path) == ["engine/dist/units.py imports tilegrad.engine; engine/dist may import ['memory']"]


def test_canary_torch_in_the_planner_is_seen(tmp_path: Path) -> None:
    (tmp_path / "memory" / "planned").mkdir(parents=True)
    (tmp_path / "memory" / "planned" / "plan.py").write_text("import torch\n", encoding="utf-8")
    assert violations(tmp_path) == ["memory/planned/plan.py imports torch; it may import the standard library only"]


def _name(path: Path, root: Path) -> str:
    parts = ("tilegrad", *path.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path, root: Path, known: set[str]) -> set[str]:
    """Modules of tilegrad that `path` imports, also inside functions, but not those only for typing."""
    package = ["tilegrad", *path.relative_to(root).parent.parts]
    found: set[str] = set()
    waiting: list[ast.AST] = [_parsed(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *((node.module or "").split(".") if node.module else [])])
            found |= {f"{module}.{a.name}" if f"{module}.{a.name}" in known else module for a in node.names}
        waiting += _statements(node)
    return found & known


def cycles(root: Path) -> list[str]:
    """Modules that import one another; a function that imports when called counts as well, because it only hides a cycle. A
    package counts as its __init__, and what imports a module imports the packages around it, but for a package that the
    module itself is in: it is being loaded already."""
    files = {_name(path, root): path for path in root.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        imports = _imports(path, root, set(files))
        around = {".".join(m.split(".")[:n]) for m in imports for n in range(2, m.count(".") + 1)} & set(files)
        graph[name] = {m for m in imports | around if not f"{name}.".startswith(f"{m}.")}
    done: set[str] = set()
    found: list[str] = []

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            found.append(" → ".join((*path[path.index(name) :], name)))
        elif name not in done:
            for other in sorted(graph[name]):
                visit(other, (*path, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())
    return found


def test_no_module_imports_itself_through_others() -> None:
    assert not cycles(ROOT), "\n".join(cycles(ROOT))


def test_canary_a_cycle_between_modules_is_seen(tmp_path: Path) -> None:
    """The cycle is one that existed: scratch → attention.checks, whose package loads a module that loads scratch."""
    (tmp_path / "kernels" / "attention").mkdir(parents=True)
    (tmp_path / "kernels" / "__init__.py").write_text("", encoding="utf-8")
    (tmp_path / "kernels" / "scratch.py").write_text("from .attention.checks import check_tensor\n", encoding="utf-8")
    (tmp_path / "kernels" / "attention" / "__init__.py").write_text("from .contract import fwd\n", encoding="utf-8")
    (tmp_path / "kernels" / "attention" / "checks.py").write_text("check_tensor = 1\n", encoding="utf-8")
    (tmp_path / "kernels" / "attention" / "contract.py").write_text("from ..scratch import Scratch\n", encoding="utf-8")
    found = cycles(tmp_path)
    assert len(found) == 1 and "kernels.scratch" in found[0] and "attention.contract" in found[0]


@pytest.mark.parametrize("first", ["from .b import y", "def f():\n    from .b import y", "import tilegrad.train.b"])
def test_canary_an_import_inside_a_function_closes_a_cycle(tmp_path: Path, first: str) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.py").write_text(f"{first}\n", encoding="utf-8")
    (tmp_path / "train" / "b.py").write_text("class B:\n    def f(self):\n        from .a import x\n", encoding="utf-8")
    assert cycles(tmp_path) == ["tilegrad.train.a → tilegrad.train.b → tilegrad.train.a"]
    (tmp_path / "train" / "b.py").write_text("if TYPE_CHECKING:\n    from .a import x\n", encoding="utf-8")
    assert not cycles(tmp_path)


@pytest.mark.slow
def test_every_module_can_be_the_first_import() -> None:
    """Each module is the first import of a forked process. Forks start at once, because torch and Triton are loaded already."""
    names = sorted(_name(path, ROOT) for path in ROOT.rglob("*.py") if path.name != "__main__.py")
    code = (
        "import importlib, importlib.util, os, sys, torch\n"
        "if importlib.util.find_spec('triton'):\n"
        "    import triton.experimental.gluon.language.nvidia.hopper\n"
        "for name in sys.argv[1:]:\n"
        "    if (child := os.fork()) == 0:\n"
        "        importlib.import_module(name)\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(child, 0)[1] == 0, name\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT.parent)}
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def run_python(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT.parent)}
    return subprocess.run(
        [sys.executable, *flags, "-c", code], capture_output=True, text=True, check=True, env=environment
    )


def test_import_tilegrad_loads_no_torch_and_uses_no_gpu() -> None:
    run_python("import tilegrad, sys; assert 'torch' not in sys.modules")
    done = python(
        "import tilegrad, torch\n"
        "tilegrad.attention, tilegrad.Mask, tilegrad.attention_fwd\n"
        "assert not torch.cuda.is_initialized()"
    )
    assert done.returncode == 0, done.stderr


def test_importing_every_public_name_takes_few_calls(tmp_path: Path) -> None:
    """The public names and the command line load 165 modules; a GPU's kernels are loaded when one is used. The test counts
    function calls, because times depend on other programs: 135,000 calls took 160 ms on a Xeon, with torch loaded before."""
    others = "import ctypes, html, json, safetensors.torch, tomllib, torch.library, torch.nn, unittest.mock"
    ours = "import tilegrad, tilegrad.cli\nfor name in tilegrad.__all__: getattr(tilegrad, name)"
    code = (
        f"{others}\n"
        "import sys\n"
        "sys.dont_write_bytecode = False\n"  # bytecode is written, as for a user
        f"sys.pycache_prefix = {str(tmp_path)!r}\n"  # tilegrad's bytecode; torch's is elsewhere
        "calls = 0\n"
        "def count(frame, event, argument):\n"
        "    global calls\n"
        "    calls += event in ('call', 'c_call')\n"
        "sys.setprofile(count)\n"
        f"{ours}\n"
        "sys.setprofile(None)\n"
        "print(calls, sum(name.startswith('tilegrad') for name in sys.modules))"
    )
    python(code)  # writes the bytecode
    calls, modules = map(int, run_python(code).stdout.split())
    assert modules > 150 and calls < 160_000, f"{calls:,} calls in {modules} modules"
