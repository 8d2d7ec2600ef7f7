"""The wheel and the sdist install and run, and the code of the documentation runs."""

from __future__ import annotations

import doctest
import importlib
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.ops import DTYPES, acc, allocated_bytes

import tilegrad
from tilegrad import functional, masks, nn
from tilegrad.engine import sampling, spec
from tilegrad.functional import linear_cross_entropy as loss
from tilegrad.integrations import flash_attn as flash
from tilegrad.kernels.scratch import new_scratch
from tilegrad.model import config
from tilegrad.native import build as native_build
from tilegrad.specification import shared_attention
from tilegrad.training import api

HERE = Path(__file__).parents[2]


def test_the_version_is_written_only_in_the_package() -> None:
    content = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))
    assert content["project"]["dynamic"] == ["version"] and "version" not in content["project"]
    stated = HERE / content["tool"]["hatch"]["version"]["path"]
    assert f'__version__ = "{tilegrad.__version__}"' in stated.read_text(encoding="utf-8")


def test_public_names_exist_and_are_documented() -> None:
    for name in tilegrad.__all__:
        assert getattr(tilegrad, name).__doc__, name
    assert set(tilegrad.__all__) <= set(dir(tilegrad))
    with pytest.raises(AttributeError, match="atention"):
        tilegrad.atention  # noqa: B018


def test_modules_are_reached_by_the_package_and_loaded_when_they_are_used() -> None:
    code = (
        "import sys, tilegrad\n"
        "assert {'nn', 'flash', 'integrations', 'memory', 'train'} <= set(dir(tilegrad))\n"
        "ours = {name for name in sys.modules if name.startswith('tilegrad.')}\n"
        "assert ours == {'tilegrad.native', 'tilegrad.native.openmp'}\n"
        "assert 'torch' not in sys.modules\n"
        "assert dir(tilegrad.integrations) and 'torch' not in sys.modules\n"
        "assert {'torch', 'transformers'} <= set(dir(tilegrad.integrations))\n"
        "tilegrad.flash.flash_attn_func, tilegrad.integrations.transformers.register, tilegrad.integrations.torch.register\n"
        "tilegrad.nn.Attention, tilegrad.memory.MemoryPlan, tilegrad.train\n"
        "from tilegrad.masks import documents\n"
        "assert tilegrad.nn is sys.modules['tilegrad.nn'] and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    for module in (tilegrad, tilegrad.integrations):
        with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'nothing'"):
            module.nothing  # noqa: B018


@pytest.mark.parametrize(
    "module", [flash, functional, masks, loss, nn.attention, nn.dilated, shared_attention, config, spec, sampling, api]
)
def test_examples_in_docstrings_run(module: ModuleType) -> None:
    done = doctest.testmod(module)
    assert done.failed == 0
    assert done.attempted >= 2


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "docs/index.md",
        "docs/memory.md",
        "docs/training.md",
        "docs/add-an-op.md",
        "docs/weights.md",
        "docs/coming-from.md",
        "docs/tutorials/attention.md",
        "docs/tutorials/train.md",
    ],
)
def test_code_in_documents_runs(document: str) -> None:
    """The blocks run in order, because a block may use the names of an earlier one."""
    run_blocks(document)


def blocks_of(document: str) -> list[str]:
    blocks = re.findall(r"```python\n(.*?)```", (HERE / document).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    return blocks


def run_blocks(document: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": __name__}
    for block in blocks_of(document):
        exec(compile(block, document, "exec"), names)
    return names


def test_the_op_of_the_tutorial_allocates_nothing() -> None:
    names = run_blocks("docs/add-an-op.md")
    for dtype in DTYPES:
        x, dy, y, dx = torch.ones(4, 1023, 48, dtype=dtype)
        w, dw = torch.ones(48, dtype=dtype), torch.zeros(48, dtype=acc(dtype))
        scratch = new_scratch(names["scale_workspace"](x), "cpu")
        for accumulate in (True, False):
            backward = partial(names["scale_bwd"], dy, x, w, dx=dx, dw=dw, scratch=scratch, accumulate=accumulate)
            assert allocated_bytes(backward) <= 1024, dtype
        assert allocated_bytes(partial(names["scale_fwd"], x, w, y=y)) <= 1024, dtype


def test_the_op_of_the_tutorial_passes_the_linter() -> None:
    """The first block is linted as a file; then the whole page, whose imports are in the blocks that need them."""
    pytest.importorskip("ruff")
    first, *rest = blocks_of("docs/add-an-op.md")
    for code, options in ((first, ()), ("\n\n".join([first, *rest]), ("--ignore", "E402"))):
        for command in (("check", *options), ("format", "--check")):
            run = [sys.executable, "-m", "ruff", *command, "--stdin-filename", "src/tilegrad/kernels/scale.py", "-"]
            done = subprocess.run(run, input=code, cwd=HERE, capture_output=True, encoding="utf-8")
            assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_is_short() -> None:
    assert len((HERE / "README.md").read_text(encoding="utf-8").splitlines()) <= 90


@pytest.mark.parametrize(
    "document", [*sorted(p.name for p in (HERE / "docs").glob("*.md")), "README.md", "CONTRIBUTING.md"]
)
def test_every_file_and_test_that_a_document_names_exists(document: str) -> None:
    path = HERE / document if document.isupper() or document[0].isupper() else HERE / "docs" / document
    text = path.read_text(encoding="utf-8")
    missing = []
    for name in re.findall(r"`((?:src|tests|docs|benchmarks|kernels|memory|model|train|bench)/[\w./]+)`", text):
        if not any((base / name).exists() for base in (HERE, HERE / "src" / "tilegrad")):
            missing.append(name)
    tests = "\n".join(p.read_text(encoding="utf-8") for p in (HERE / "tests").rglob("*.py"))
    missing += [
        name
        for name in re.findall(r"`(test_\w+)`", text)
        if f"def {name}(" not in tests and not any((HERE / "tests").rglob(f"{name}.py"))
    ]
    missing += [start for start in re.findall(r"`(test_\w+)…`", text) if f"def {start}" not in tests]
    missing += [link for link in re.findall(r"\]\(((?!https?:)[^)#]+)", text) if not (path.parent / link).exists()]
    assert not missing


def test_no_tracked_file_names_a_machine() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=HERE, capture_output=True, text=True)
    if files.returncode:
        pytest.skip("not a git checkout")
    pattern = re.compile(r"/(?:root|home/\w+|work)/")
    for name in files.stdout.split():
        path = HERE / name
        if path.suffix in (".py", ".md", ".toml", ".txt", ".json", ".html", "") and path.is_file():
            assert not pattern.search(path.read_text(encoding="utf-8")), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_the_wheel_and_the_sdist_install_and_run(tmp_path: Path, kind: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", f"--{kind}", "--outdir", tmp_path, HERE], check=True, capture_output=True
    )
    (built,) = tmp_path.iterdir()
    if kind == "wheel":
        names = zipfile.ZipFile(built).namelist()
        assert {"tilegrad/py.typed", "tilegrad/training/example.toml"} <= set(names) and not any(
            n.startswith("tests") for n in names
        )
        has_library = any(n.endswith(".so") for n in names)
        assert has_library == (native_build.compiler() is not None)
        tag = sysconfig.get_platform().replace("-", "_").replace(".", "_") if has_library else "any"
        assert built.name.endswith(f"-py3-none-{tag}.whl")
    target = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target, built], check=True)
    code = (
        "import tilegrad, torch, sys; assert tilegrad.__file__.startswith(sys.argv[1]), tilegrad.__file__;"
        "print(tilegrad.attention(*torch.randn(3, 1, 2, 4, 8)).shape, tilegrad.explain(*torch.randn(3, 1, 2, 4, 8)).kernel)"
    )
    kernel = "tiled" if native_build.compiler() is None else "native"
    done = subprocess.run(
        [sys.executable, "-c", code, target],
        env={"PYTHONPATH": str(target), "PATH": str(tmp_path)},  # without a compiler: the library is in the wheel
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"torch.Size([1, 2, 4, 8]) {kernel}\n", done.stderr


def test_a_wheel_to_publish_is_not_built_without_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    warned: list[str] = []
    here = {"root": str(HERE), "app": SimpleNamespace(display_warning=warned.append)}
    name = "hatchling.builders.hooks.plugin.interface"  # hatchling is installed only while a wheel is built
    for n in range(1, 6):
        monkeypatch.setitem(sys.modules, ".".join(name.split(".")[:n]), ModuleType(name))
    monkeypatch.setattr(sys.modules[name], "BuildHookInterface", type("BuildHookInterface", (), here), raising=False)
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.delitem(sys.modules, "hatch_build", raising=False)
    one = importlib.import_module("hatch_build").CustomBuildHook()
    monkeypatch.delitem(sys.modules, "hatch_build")
    data: dict[str, object] = {"artifacts": []}
    one.initialize("standard", data)
    assert data == {"artifacts": []} and "without its native CPU kernel: no C++ compiler" in warned[0]
    monkeypatch.setenv("TILEGRAD_NATIVE", "require")
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler"):
        one.initialize("standard", data)
    released = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cibuildwheel"][
        "environment"
    ]
    assert released == {"TILEGRAD_NATIVE": "require"}


def test_the_project_metadata_has_its_addresses() -> None:
    urls = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    assert {"Homepage", "Documentation", "Repository", "Issues", "Changelog"} <= urls.keys()
    assert all(url.startswith("https://") for url in urls.values())
