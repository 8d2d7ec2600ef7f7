"""Value embeddings: against autograd, in every kernel."""

from __future__ import annotations

import pytest
import torch
from support import bounds
from support.ops import DTYPES, acc, assert_factors_are_seen, assert_true, poisoned, randn
from torch import Tensor

from tilegrad.kernels.scratch import new_scratch
from tilegrad.kernels.value_embedding import value_embedding_bwd, value_embedding_fwd, value_embedding_workspace

SHAPES = ((1, 1, 1, 1, 1), (3, 23, 20, 17, 17), (2, 63, 300, 64, 192), (2, 63, 3, 48, 61))  # b, t, v, w, columns


def given(b: int, t: int, v: int, w: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    tokens = torch.randint(0, v, (b, t), generator=torch.Generator().manual_seed(b * t))
    rows, drows = (randn(b * t, columns, dtype=dtype, seed=seed) for seed in range(2))
    scalar = torch.tensor([-1.25], dtype=dtype)
    return tokens, {"rows": rows, "table": randn(v, w, dtype=dtype, seed=2), "scalar": scalar}, drows


def formula_of(tokens: Tensor):
    def formula(rows: Tensor, table: Tensor, scalar: Tensor) -> dict[str, Tensor]:
        added = scalar * table[tokens.flatten()]
        return {"v": rows[:, rows.shape[1] - table.shape[1] :] + added}

    return formula


def run(tokens: Tensor, inputs: dict[str, Tensor], drows: Tensor) -> dict[str, Tensor]:
    table, scalar, wide = inputs["table"], inputs["scalar"], acc(drows.dtype)
    rows, before = inputs["rows"].clone(), drows.clone()
    dtable, dscalar = torch.zeros_like(table, dtype=wide), torch.zeros_like(scalar, dtype=wide)
    scratch = poisoned(value_embedding_workspace(rows, table, backward=False))
    value_embedding_fwd(tokens, table, scalar, rows=rows, scratch=scratch)
    scratch = poisoned(value_embedding_workspace(rows, table, backward=True))
    value_embedding_bwd(drows, tokens, table, scalar, dtable=dtable, dscalar=dscalar, scratch=scratch)
    others = rows.shape[1] - table.shape[1]
    assert torch.equal(rows[:, :others], inputs["rows"][:, :others]) and torch.equal(drows, before)
    return {"v": rows[:, others:], "dtable": dtable, "dscalar": dscalar}


def assert_right(got: dict[str, Tensor], tokens: Tensor, inputs: dict[str, Tensor], drows: Tensor) -> None:
    """s dv is rounded before it is added to the table's gradient."""
    dv = drows[:, drows.shape[1] - inputs["table"].shape[1] :]
    g, index = bounds.of(dv), tokens.flatten()
    v, e, s = (bounds.of(x) for x in (inputs["rows"][:, -dv.shape[1] :], inputs["table"][index], inputs["scalar"]))
    found = {
        "v": v + e * s,
        "dtable": (g * s).rounded(drows.dtype).scattered(index, len(inputs["table"])),
        "dscalar": (g * e).flat().sum(1).sum(0, keepdim=True),
    }
    assert_true(got, formula_of(tokens), inputs, {"v": dv}, bounds.bounds(drows.dtype, found))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_value_embeddings_agree_with_autograd(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        tokens, inputs, drows = given(*shape, dtype)
        assert_right(run(tokens, inputs, drows), tokens, inputs, drows)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_added_or_overwritten_and_none_is_left_out(dtype: torch.dtype) -> None:
    tokens, inputs, drows = given(2, 63, 300, 48, 61, dtype)
    want, scratch = (
        run(tokens, inputs, drows),
        poisoned(value_embedding_workspace(drows, inputs["table"], backward=True)),
    )
    dtable, dscalar = (torch.full_like(want[name], torch.nan) for name in ("dtable", "dscalar"))
    call = (drows, tokens, inputs["table"], inputs["scalar"])
    value_embedding_bwd(*call, dtable=dtable, accumulate=False, scratch=scratch)
    value_embedding_bwd(*call, dscalar=dscalar, accumulate=False, scratch=scratch)
    assert torch.equal(dtable, want["dtable"]) and torch.equal(dscalar, want["dscalar"])
    value_embedding_bwd(*call, dtable=dtable, dscalar=dscalar, scratch=scratch)
    assert torch.allclose(dtable, 2 * want["dtable"]) and torch.equal(dscalar, 2 * want["dscalar"])


def test_float32_weights_of_bfloat16_are_rounded_first() -> None:
    tokens, inputs, drows = given(3, 23, 20, 17, 40, torch.bfloat16)
    wide = inputs | {name: inputs[name].float() for name in ("table", "scalar")}
    want, got = run(tokens, inputs, drows), run(tokens, wide, drows)
    assert all(torch.equal(got[name], x) for name, x in want.items())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_depend_neither_on_threads_nor_on_the_place(dtype: torch.dtype) -> None:
    tokens, inputs, drows = given(11, 93, 70, 113, 150, dtype)
    before, found = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        found.append(run(tokens, inputs, drows))
    torch.set_num_threads(before)
    assert all(torch.equal(found[0][name], x) for name, x in found[1].items())
    few = inputs | {"rows": inputs["rows"][93:186]}
    assert torch.equal(run(tokens[1:2], few, drows[93:186])["v"], found[0]["v"][93:186])


@pytest.mark.usefixtures("kernels")
def test_canary_a_factor_in_bfloat16_is_seen() -> None:
    tokens, inputs, drows = given(3, 23, 20, 17, 40, torch.bfloat16)
    assert_factors_are_seen(run(tokens, inputs, drows), lambda got: assert_right(got, tokens, inputs, drows))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_value_embeddings_on_the_device(dtype: torch.dtype) -> None:
    for shape in (*SHAPES, (4, 1024, 5000, 768, 2304)):
        tokens, inputs, drows = given(*shape, dtype)
        on_gpu = {name: x.cuda() for name, x in inputs.items()}
        rows, table, scalar = on_gpu.values()
        dtable, dscalar = (torch.zeros_like(x, dtype=torch.float32) for x in (table, scalar))
        for backward in (False, True):
            scratch = new_scratch(value_embedding_workspace(rows, table, backward=backward), "cuda")
            call = (tokens.cuda(), table, scalar)
            if backward:
                value_embedding_bwd(drows.cuda(), *call, dtable=dtable, dscalar=dscalar, scratch=scratch)
            else:
                value_embedding_fwd(*call, rows=rows, scratch=scratch)
        got = {"v": rows[:, rows.shape[1] - table.shape[1] :], "dtable": dtable, "dscalar": dscalar}
        assert_right({name: x.cpu() for name, x in got.items()}, tokens, inputs, drows)


def test_bad_inputs_say_what_is_accepted() -> None:
    tokens, inputs, _ = given(2, 3, 5, 4, 6, torch.float64)
    rows, table, scalar = inputs.values()
    scratch = poisoned(value_embedding_workspace(rows, table, backward=False))
    narrow = rows[:, :3]
    for fn, match in (
        (lambda: value_embedding_fwd(tokens, table, scalar, rows=narrow), r"rows: got \(6, 3\); accepted: \(N, 4 or more\)"),
        (lambda: value_embedding_fwd(tokens, table, scalar, rows=rows), "scratch: value_embedding got no 'gathered'"),
        (lambda: value_embedding_fwd(tokens[:1], table, scalar, rows=rows, scratch=scratch), r"x: got .*accepted: .*\(3, 4\)"),
        (lambda: value_embedding_fwd(tokens, table, scalar[0], rows=rows, scratch=scratch), r"a: got .*accepted: .*\(1,\)"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            fn()
