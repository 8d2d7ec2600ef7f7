"""Float8 on a CPU, by the kernel that checks those of the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tilegrad.engine import batch
from tilegrad.kernels import fp8_linear
from tilegrad.kernels.table import Table


@contextmanager
def float8_on_cpu() -> Iterator[None]:
    table = Table("fp8_linear", (replace(fp8_linear.FP8_LINEAR.rows[1], by_name_only=None),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8_linear, "FP8_LINEAR", table)
        patch.setattr(batch, "FP8_LINEAR", table)
        yield
