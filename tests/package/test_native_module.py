"""Extension modules in C++ (native/extension.py) are built where there is a compiler, and refused by name if they don't fit."""

from __future__ import annotations

import functools
import sysconfig
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tilegrad.cli import main
from tilegrad.functional import fast_path
from tilegrad.memory.managed import hit
from tilegrad.native import build as native_build
from tilegrad.native import extension as native_module

HOMES = {"eager calls": fast_path, "the manager's hits": hit}


@pytest.fixture(params=HOMES)
def what(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.skipif(native_build.compiler() is None, reason="needs a C++ compiler")
def test_a_module_is_built_where_there_is_a_compiler(what: str) -> None:
    module = HOMES[what].MODULE
    assert module.digest().encode() in module.path().read_bytes()
    assert isinstance(HOMES[what].load(), ModuleType), HOMES[what].load()


def test_a_file_that_is_not_a_module_is_refused_by_name(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = HOMES[what]
    module = replace(home.MODULE, folder=tmp_path)
    monkeypatch.setattr(home, "MODULE", module)
    monkeypatch.setattr(home, "load", home.load.__wrapped__)
    for content, reason in (
        (None, f"was not built for torch {torch.__version__}"),
        (b"of another digest", "was built from another source"),
        (b"\x7fELF\x02" + bytes(35) + b"\xff\xff" + bytes(40) + module.digest().encode(), "its file is truncated"),
        (module.digest().encode(), "can't be loaded"),
    ):
        if content is not None:
            module.path().write_bytes(content)
        found = home.load()
        assert isinstance(found, str) and reason in found and "run: tilegrad doctor --build" in found
        assert main(["doctor"]) == 0
        assert f"through Python: the C++ module {found}" in capsys.readouterr().out


def test_a_failed_build_reports_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("#error not today\n", encoding="utf-8")
    for home in HOMES.values():
        monkeypatch.setattr(home, "MODULE", replace(home.MODULE, source=source, folder=tmp_path))
        monkeypatch.setattr(home, "load", functools.cache(home.load.__wrapped__))
    if native_build.compiler():
        with pytest.raises(RuntimeError, match="not today"):
            fast_path.MODULE.build()
    monkeypatch.setattr(native_module, "compiler", lambda: None)
    monkeypatch.setattr(native_build, "build", lambda: "the library")
    assert main(["doctor", "--build"]) == 0
    said = capsys.readouterr().err
    for what in HOMES:
        assert f"{what} in C++ were not built, so they run in Python: no C++ compiler" in said


def test_a_tensor_with_an_unknown_layout_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda _size: SimpleNamespace(_cdata=1))
    found = hit.load.__wrapped__()
    assert isinstance(found, str)
    assert isinstance(hit.load(), str) or "cannot read tensor objects" in found


@pytest.mark.skipif(native_build.compiler() is None, reason="needs a C++ compiler")
def test_hits_are_not_compiled_for_a_python_without_the_gil() -> None:
    cxx = native_build.compiler()
    assert cxx is not None
    flags = ("-std=c++20", "-fsyntax-only", "-Wfatal-errors", f"-I{sysconfig.get_paths()['include']}")
    with pytest.raises(RuntimeError, match="under the GIL; this Python is built without it"):
        native_build.run([cxx, *flags, "-DPy_GIL_DISABLED", str(hit.MODULE.source)])
