"""A mark for tests that need the native library, and a context without the library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tilegrad.functional import call as eager_call
from tilegrad.kernels.attention import api
from tilegrad.kernels.cpu import library
from tilegrad.native import build

MISSING = library.library()
needs_library = pytest.mark.skipif(isinstance(MISSING, str), reason=f"the native library {MISSING}")
ISAS = () if isinstance(MISSING, str) else library.supported()
each_isa = pytest.mark.parametrize(
    "isa",
    [
        pytest.param(isa, marks=pytest.mark.skipif(isa not in ISAS, reason=f"library or CPU has no {isa}"))
        for isa in library.ISAS
    ],
)


@contextmanager
def without_library(folder: Path) -> Iterator[Path]:
    """There is no library and no compiler inside, as on a machine without one. Yields the path where a library would be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "LIBRARY", folder / "none.so")
        patch.setenv("CXX", str(folder / "no-compiler"))
        patch.setattr(api, "prepared_calls", {})  # prepared calls of the library
        patch.setattr(eager_call, "fast_path", None)
        library.library.cache_clear()
        library.warn_if_missing.cache_clear()
        try:
            yield folder / "none.so"
        finally:
            patch.undo()
            library.library.cache_clear()
            library.warn_if_missing.cache_clear()
