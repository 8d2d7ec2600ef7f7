"""Triton's cache on disk: what compiles a kernel again."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tilegrad.kernels.triton_key import set_key

triton = pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")

SOURCE = '''"""A module."""
import triton
import triton.language as tl
from triton.language.core import builtin

SIZE = tl.constexpr(4)


@builtin
def low(x, _semantic=None):
    """The builtin."""
    return x


@triton.jit
def inner(x):
    """The inner function."""
    return inner(x) if x.numel < 0 else x + 1  # a comment


@triton.jit
def kernel(x, n, BLOCK: tl.constexpr):
    """The kernel."""
    i = tl.arange(0, BLOCK)
    # another comment
    tl.store(x + i, low(inner(i)) + SIZE, mask=i < n)
'''
TEXT = {
    "a line above": ("SIZE =", "\n\nSIZE ="),
    "a docstring": ("The kernel.", "The kernel, in other words."),
    "no docstring of a called function": ('    """The inner function."""\n', ""),
    "comments": ("# another comment", "# no comment"),
    "the docstring of a builtin": ("The builtin.", "A builtin."),
}
CODE = {
    "the kernel": ("i < n", "i <= n"),
    "a called function": ("x + 1", "x + 2"),
    "a constant": ("constexpr(4)", "constexpr(5)"),
    "a builtin": ("return x\n", "return -x\n"),
    "an annotation": ("BLOCK: tl.constexpr", "BLOCK"),
}


@pytest.fixture
def kernel_of(tmp_path: Path) -> Callable[[str], Any]:
    def load(source: str) -> Any:
        name = f"tilegrad.probe{len(list(tmp_path.iterdir()))}"
        path = tmp_path / f"{name}.py"
        path.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        del sys.modules[name]
        for each in (module.inner, module.kernel):
            each._fn_name = each._fn_name.replace(name, "tilegrad.probe")
        return module.kernel

    return load


def key_of(kernel: Any) -> str:
    set_key(kernel)
    return str(kernel.cache_key)


def test_only_code_changes_the_key(kernel_of: Callable[[str], Any]) -> None:
    want = key_of(kernel_of(SOURCE))
    for name, change in (TEXT | CODE).items():
        assert change[0] in SOURCE
        changed = SOURCE.replace(*change)
        assert (key_of(kernel_of(changed)) == want) == (name in TEXT), name


def test_tritons_own_key_changes_with_the_text(kernel_of: Callable[[str], Any]) -> None:
    """If this fails, a part of triton_key.py is not needed any more."""
    want = kernel_of(SOURCE).cache_key
    for name in ("a line above", "a docstring", "comments"):
        assert kernel_of(SOURCE.replace(*TEXT[name])).cache_key != want, name
    assert kernel_of(SOURCE.replace(*CODE["a builtin"])).cache_key == want


def test_the_source_stays_what_triton_compiles(kernel_of: Callable[[str], Any]) -> None:
    kernel = kernel_of(SOURCE)
    before = kernel.src, kernel.starting_line_number
    first = key_of(kernel)
    assert (kernel.src, kernel.starting_line_number) == before and "another comment" in kernel.src
    assert key_of(kernel) == first and kernel.used_global_vals
