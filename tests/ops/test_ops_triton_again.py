"""The tests of the loss, AdamW, embeddings, rope and dropout again, in Triton's interpreter, where the tables choose Triton.

The oracle, the bounds, ragged sizes, poisoned scratch and canaries are those files' own. float64 is torch's there too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.interpreter import INTERPRETED, in_the_interpreter, interpreted

from tilegrad.kernels import adamw, cross_entropy, dropout, embedding, global_norm, mix, rope
from tilegrad.kernels.adamw import ADAMW
from tilegrad.kernels.cross_entropy import CROSS_ENTROPY
from tilegrad.kernels.dropout import DROPOUT
from tilegrad.kernels.embedding import EMBEDDING
from tilegrad.kernels.global_norm import GLOBAL_NORM
from tilegrad.kernels.mix import MIX
from tilegrad.kernels.rope import ROPE
from tilegrad.kernels.scratch import Form
from tilegrad.kernels.table import Table

pytest.importorskip("triton", reason="needs Triton")
TABLES: dict[Table, Any] = {
    CROSS_ENTROPY: cross_entropy.Problem,
    ADAMW: adamw.Problem,
    GLOBAL_NORM: global_norm.Problem,
    EMBEDDING: embedding.Problem,
    ROPE: rope.Problem,
    DROPOUT: dropout.Problem,
    MIX: mix.Problem,
}
FILES = {
    "test_ops_loss.py": "cross_entropy and not allocated and not large_batch and not losses or losses and 1000 and cross",
    "test_ops_adamw.py test_ops_embedding.py": "not allocated and not bad_inputs and (test_ops_adamw and not True "
    "or test_ops_embedding and not in_float32 and not dtype1)",
    "test_ops_activation.py test_ops_mix.py test_ops_triton_again.py": "(rope and not 65536 or dropout or mix) "
    "and not dtype1 or interpreted",
}  # a process each: its imports take seconds


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter")
@pytest.mark.parametrize("files", FILES)
def test_in_the_interpreter(files: str, request: pytest.FixtureRequest) -> None:
    in_the_interpreter(*(str(request.path.with_name(name)) for name in files.split()), "-k", FILES[files])


def problem(table: Table, dtype: torch.dtype) -> Any:
    x = Form((64, 64), dtype, torch.device("cpu"))
    return TABLES[table](x, x) if table is CROSS_ENTROPY else TABLES[table](x)


@interpreted
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.op)
def test_interpreted_calls_are_tritons(table: Table) -> None:
    """Else the files above would test torch's kernels once more."""
    for dtype in (torch.float32, torch.bfloat16):
        assert table.select(problem(table, dtype)).name == "triton"
    assert table.select(problem(table, torch.float64)).name == "torch"


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter")
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.op)
def test_a_cpu_keeps_torchs_and_says_why(table: Table) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert table.select(problem(table, dtype)).name == "torch"
    with pytest.raises(ValueError, match="kernel: got 'triton', which can't run this call: needs a CUDA device"):
        table.select(problem(table, torch.float32), "triton")
    with pytest.raises(ValueError, match="bfloat16 and float32"):
        table.select(problem(table, torch.float64), "triton")


def test_float16_is_no_dtype_of_tritons_loss() -> None:
    with pytest.raises(ValueError, match="below what float16 can hold; 'torch' would run it"):
        CROSS_ENTROPY.select(problem(CROSS_ENTROPY, torch.float16), "triton")
