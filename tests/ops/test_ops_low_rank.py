"""The products of an adapter in torch and in Triton, against float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import bounds
from support.ops import acc, poisoned, randn
from torch import Tensor

from tilegrad.kernels.closeness import assert_close
from tilegrad.kernels.linear import linear_bwd_input
from tilegrad.kernels.low_rank import (
    LOW_RANK,
    Part,
    Problem,
    join_fwd,
    joined_linear_bwd_input,
    joined_linear_fwd,
    joins,
    low_rank_add_fwd,
    low_rank_bwd,
    low_rank_bwd_a,
    low_rank_linear_bwd_input,
    low_rank_linear_fwd,
    low_rank_workspace,
)
from tilegrad.kernels.scratch import Form

SHAPES = ((1, 1, 1), (70, 40, 3), (130, 300, 16), (65, 17, 20))  # n, width, r
SCALE = 0.75


def gradients(n: int, width: int, r: int, dtype: torch.dtype, device: str, kernel: str, *, accumulate: bool) -> None:
    """Runs one part, in columns of larger buffers. The other columns must not change."""
    u, dy = randn(n, 3 * r, dtype=dtype).to(device), randn(n, width + 8, dtype=dtype, seed=1).to(device)
    b, x = randn(width, r, dtype=dtype, seed=2).to(device), randn(n, width, dtype=dtype, seed=3).to(device)
    a = randn(r, width, dtype=dtype, seed=4).to(device)
    du, part = torch.full_like(u, 7.0), Part(0, r, 8)
    db, da = (torch.full(w.shape, 0.5, dtype=acc(dtype), device=device) for w in (b, a))
    scratch = {
        name: x.to(device)
        for name, x in poisoned(
            low_rank_workspace(Form((n, width), dtype, x.device), a, [b], backward=True, kernel=kernel)
        ).items()
    }
    where: Any = {"accumulate": accumulate, "scratch": scratch, "kernel": kernel}
    low_rank_bwd([dy], u, [b], (part,), SCALE, du=du, dbs=[db], **where)
    low_rank_bwd_a(du[:, r : 2 * r], x, a, da=da, **where)
    own, mine = bounds.of(u[:, r : 2 * r]), bounds.of(dy[:, 8:])
    begun = bounds.of(torch.full_like(db, 0.5)) if accumulate else None
    numbers = {
        "du": mine @ bounds.of(b) * SCALE,
        "db": mine.mT @ own,
        "da": bounds.of(du[:, r : 2 * r]).mT @ bounds.of(x),
    }
    if begun is not None:
        numbers |= {"db": numbers["db"] + begun, "da": numbers["da"] + bounds.of(torch.full_like(da, 0.5))}
    d, v = dy[:, 8:].double(), u[:, r : 2 * r].double()
    exact = {"du": d @ b.double() * SCALE, "db": d.mT @ v, "da": du[:, r : 2 * r].double().mT @ x.double()}
    exact |= {name: exact[name] + 0.5 * accumulate for name in ("db", "da")}
    got = {"du": du[:, r : 2 * r], "db": db, "da": da}
    assert_close(got, exact, bounds.bounds(dtype, numbers))
    assert bool((du[:, :r] == 7.0).all() and (du[:, 2 * r :] == 7.0).all())
    db.fill_(0.25)
    low_rank_bwd([dy], u, [b], (part,), SCALE, du=du, dbs=[None], **where)
    assert_close({"du": du[:, r : 2 * r]}, {"du": exact["du"]}, bounds.bounds(dtype, {"du": numbers["du"]}))
    assert bool((db == 0.25).all())


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("n", "width", "r"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_by_products_agree_with_float64(
    n: int, width: int, r: int, dtype: torch.dtype, accumulate: bool
) -> None:
    gradients(n, width, r, dtype, "cpu", "torch", accumulate=accumulate)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("n", "width", "r"), SHAPES)
@pytest.mark.parametrize(("dtype", "accumulate"), [(torch.float32, True), (torch.float16, False)])
def test_interpreted_gradients_agree_with_float64(
    n: int, width: int, r: int, dtype: torch.dtype, accumulate: bool
) -> None:
    pytest.importorskip("triton", reason="needs Triton")
    gradients(n, width, r, dtype, "cpu", "triton", accumulate=accumulate)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("count", [1, 3, 16, 17, 40])
def test_parts_are_added_one_after_the_other(count: int) -> None:
    """Sixteen loads start together."""
    pytest.importorskip("triton", reason="needs Triton")
    from tilegrad.kernels.low_rank import triton_ops

    parts = randn(count, 21, 3, dtype=torch.float32)
    expected = torch.zeros(21, 3)
    for part in parts:
        expected = expected + part
    out = torch.full((3, 21), torch.nan)
    triton_ops._sum(parts, out=out.t(), scale=1.0, accumulate=False)
    assert torch.equal(out.t(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_on_the_device_agree_with_float64(dtype: torch.dtype) -> None:
    """Only Triton runs large shapes: cuBLAS errs by up to 1.9 × the bound, because a tensor core adds thousands of products."""
    for n, width, r in SHAPES:
        gradients(n, width, r, dtype, "cuda", "torch", accumulate=True)
    for n, width, r in (*SHAPES, (8192, 896, 48), (4096, 4864, 16)):
        gradients(n, width, r, dtype, "cuda", "triton", accumulate=True)


@pytest.mark.parametrize("architecture", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_kernels_of_gradients_compile_without_spills(architecture: int, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton", reason="needs Triton")
    if triton.knobs.runtime.interpret or torch.cuda.is_available():
        pytest.skip("compiles for GPUs that are not there")
    from support.compiler import SHARED_MEMORY_BYTES, compiling

    from tilegrad.kernels.low_rank import triton_ops

    dy, u, b = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((4096, 4864), (4096, 16), (4864, 16)))
    scratch = poisoned(triton_ops.workspace(dy, u, b, du=True))
    with compiling(architecture, tmp_path) as found:
        triton_ops.bwd(dy, u, b, 2.0, du=u, db=torch.empty(4864, 16), accumulate=True, scratch=scratch)
        triton_ops.bwd_a(u, dy, b.t(), da=torch.empty(16, 4864), accumulate=True, scratch=scratch)
    for name, kernel in found.items():
        assert kernel.spilled_bytes == 0, name
        assert kernel.shared_bytes <= SHARED_MEMORY_BYTES[architecture], name
        assert "ATOM" not in kernel.sass and "RED." not in kernel.sass, f"{name} has atomics"
    assert "LDGSTS" in found["_low_rank_kernel"].sass, "loads do not go ahead of the arithmetic"


@pytest.mark.usefixtures("interpreter")
def test_da_alone_needs_no_scratch_for_du() -> None:
    """x has 40 times the columns of dy, so that parts of du for x would be 40 times as large."""
    pytest.importorskip("triton", reason="needs Triton")
    x, a, b = (Form(shape, torch.float32, torch.device("cpu")) for shape in ((64, 5120), (4, 5120), (128, 4)))
    shapes = low_rank_workspace(x, a, [b], backward=True, kernel="triton")
    assert {name.rpartition(".")[2]: shape for name, (shape, _) in shapes.items() if "_parts" in name} == {
        "du_parts": (1, 64, 4), "db_parts": (1, 5120, 4)
    }  # fmt: skip


@pytest.mark.usefixtures("interpreter")
def test_adapters_of_a_high_rank_use_products() -> None:
    pytest.importorskip("triton", reason="needs Triton")
    x, thin = (Form((64, size), torch.float32, torch.device("cpu")) for size in (64, 65))
    assert "takes up to 64 columns of u, not 65" in LOW_RANK.explain(Problem(x, thin, x)).reasons["triton"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
def test_a_joined_product_equals_the_two_products(dtype: torch.dtype, bias: bool) -> None:
    n, c, out, r = 40, 6, 24, 3
    parts = (Part(0, 0, 0), Part(0, 2 * r, 16))
    x, w, u = (randn(*shape, dtype=dtype, seed=i) for i, shape in enumerate(((n, c), (out, c), (n, 3 * r))))
    bs, a = [randn(8, r, dtype=dtype, seed=i) for i in (3, 4)], randn(3 * r, c, dtype=dtype, seed=5)
    b = randn(out, dtype=dtype, seed=6) if bias else None
    dense = torch.zeros(out, 3 * r, dtype=torch.float64)
    dense[:8, :r], dense[16:, 2 * r :] = bs[0], bs[1]
    y, joined, wb = (
        torch.full(shape, torch.nan, dtype=dtype) for shape in ((n, out), (n, c + 3 * r), (out, c + 3 * r))
    )
    exact = x.double() @ w.double().t() + u.double() @ dense.t() + (0 if b is None else b.double())
    join_fwd(x, u, joined=joined)
    assert torch.equal(joined, torch.cat([x, u], 1))
    limit = 1e-12 if dtype == torch.float64 else 1e-5
    joined_linear_fwd(joined, w, b, bs, parts, y=y, wb=wb)
    assert_near(y, exact, limit)
    low_rank_linear_fwd(x, w, b, u, bs, parts, y=y.fill_(torch.nan))
    assert_near(y, exact, limit)
    low_rank_add_fwd(u, bs, parts, ys=[y])
    assert_near(y, exact + u.double() @ dense.t(), limit)
    dx, joined, wa = (
        torch.full(shape, torch.nan, dtype=dtype) for shape in ((n, c), (n, out + 3 * r), (out + 3 * r, c))
    )
    exact = y.double() @ w.double() + u.double() @ a.double()
    joined_linear_bwd_input(y, w, u, a, dx=dx, joined=joined, wa=wa)
    assert_near(dx, exact, limit)
    low_rank_linear_bwd_input(y, w, u, a, dx=dx.fill_(torch.nan), accumulate=False)
    assert_near(dx, exact, limit)
    low_rank_linear_bwd_input(y, w, u, a, dx=dx, accumulate=True)
    assert_near(dx, 2 * exact, limit)


def test_products_with_at_least_twice_as_many_outputs_as_inputs_are_joined() -> None:
    w = torch.empty(24, 6)
    assert joins(w, torch.float32, 6, 24) and not joins(w, torch.float32, 24, 6) and not joins(w, torch.bfloat16, 6, 24)
    assert not joins(torch.empty(4, 6, 6), torch.float32, 6, 24) and not joins(w[:11], torch.float32, 6, 11)


def assert_near(got: Tensor, exact: Tensor, limit: float) -> None:
    assert float((got.double() - exact).abs().max()) <= limit * float(exact.abs().max())


def test_wrong_parts_of_a_product_are_refused() -> None:
    u, b, y = randn(4, 6, dtype=torch.float32), randn(5, 3, dtype=torch.float32), randn(4, 8, dtype=torch.float32)
    for part in (Part(0, 4, 0), Part(0, 0, 4)):
        with pytest.raises(ValueError, match=r"parts: got .*accepted: columns inside u"):
            low_rank_add_fwd(u, [b], (part,), ys=[y])
    w, dx = randn(8, 3, dtype=torch.float32), torch.empty(4, 3)
    with pytest.raises(ValueError, match=r"scale: got 2.0"):
        linear_bwd_input(y, w, dx=dx, accumulate=True, scale=2.0)
