"""Extension modules in C++ (native/extension.py): built where they can be, refused by name where they don't fit."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tilegrad.cli import main
from tilegrad.functional import eager
from tilegrad.native import build as native_build
from tilegrad.native import extension as native_module


@pytest.mark.skipif(native_build.compiler() is None, reason="needs a C++ compiler")
def test_a_module_is_built_where_a_compiler_is() -> None:
    module = eager.MODULE
    assert module.digest().encode() in module.path().read_bytes()
    assert isinstance(eager.load(), ModuleType), eager.load()


def test_a_file_that_is_no_module_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = replace(eager.MODULE, folder=tmp_path)
    monkeypatch.setattr(eager, "MODULE", module)
    monkeypatch.setattr(eager, "load", eager.load.__wrapped__)
    for content, reason in (
        (None, f"was not built for torch {torch.__version__}"),
        (b"of another digest", "was built from another source"),
        (b"\x7fELF\x02" + bytes(35) + b"\xff\xff" + bytes(40) + module.digest().encode(), "its file is cut off"),
        (module.digest().encode(), "can't be loaded"),
    ):
        if content is not None:
            module.path().write_bytes(content)
        found = eager.load()
        assert isinstance(found, str) and reason in found and "run: tilegrad doctor --build" in found
        assert main(["doctor"]) == 0
        assert f"through Python: C++ for them {found}" in capsys.readouterr().out


def test_a_build_that_fails_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("#error not today\n", encoding="utf-8")
    monkeypatch.setattr(eager, "MODULE", replace(eager.MODULE, source=source, folder=tmp_path))
    monkeypatch.setattr(eager, "load", functools.cache(eager.load.__wrapped__))
    if native_build.compiler():
        with pytest.raises(RuntimeError, match="not today"):
            eager.MODULE.build()
    monkeypatch.setattr(native_module, "compiler", lambda: None)
    monkeypatch.setattr(native_build, "build", lambda: "the library")
    assert main(["doctor", "--build"]) == 0
    assert "eager calls in C++ were not built, they go through Python: no C++ compiler" in capsys.readouterr().err
