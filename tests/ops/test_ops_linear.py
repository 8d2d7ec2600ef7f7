"""Linear layers, dense and per head, against autograd."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from support import bounds
from support.interpreter import interpreting
from support.ops import (
    DTYPES,
    RAGGED,
    acc,
    allocated_bytes,
    allowed_bytes,
    assert_true,
    linear_bwd,
    poisoned,
    randn,
)
from torch import Tensor

from tilegrad.kernels import linear, table
from tilegrad.kernels.closeness import assert_close
from tilegrad.kernels.column_sum import COLUMN_SUM, column_sum_fwd, column_sum_workspace
from tilegrad.kernels.column_sum import torch_ops as column_sum_torch
from tilegrad.kernels.cpu import library, rows
from tilegrad.kernels.linear import (
    LINEAR,
    Problem,
    bf16,
    linear_bwd_input,
    linear_fwd,
    linear_workspace,
    per_head_linear_bwd_input,
    per_head_linear_fwd,
    tiled,
)
from tilegrad.kernels.norm import rmsnorm_fwd


@pytest.fixture(autouse=True, params=["native", "torch"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native library computes the gradient of the bias; without it torch does."""
    if request.param == "torch":
        monkeypatch.setattr(rows, "refusal", lambda _x: "is switched off")


def in_tiles_of(monkeypatch: pytest.MonkeyPatch, rows: int, cols: int) -> None:
    for module in (tiled, column_sum_torch):
        monkeypatch.setattr(module, "ROWS", rows)
    for module in (tiled, bf16, column_sum_torch):
        monkeypatch.setattr(module, "COLS", cols)


def dense(x: Tensor, w: Tensor, b: Tensor | None) -> dict[str, Tensor]:
    return {"y": torch.nn.functional.linear(x, w, b)}


def per_head(x: Tensor, w: Tensor, b: Tensor | None) -> dict[str, Tensor]:
    y = torch.einsum("nhi,hoi->nho", x.view(-1, *w.shape[:2]), w)
    return {"y": (y if b is None else y + b).flatten(1)}


def run(inputs: Mapping[str, Tensor | None], dy: Tensor, *, heads: bool = False) -> dict[str, Tensor]:
    """Runs forward and backward with poisoned outputs. Gradients that accumulate start at 0."""
    x, w, b = inputs["x"], inputs["w"], inputs["b"]
    assert x is not None and w is not None
    fwd, scratch = per_head_linear_fwd if heads else linear_fwd, poisoned(linear_workspace(x, w, backward=True))
    out = {"y": torch.full_like(dy, torch.nan), "dx": torch.full_like(x, torch.nan)}
    out["dw"] = torch.zeros_like(w, dtype=acc(w.dtype))
    if b is not None:
        out["db"] = torch.zeros_like(b, dtype=acc(b.dtype))
    fwd(x, w, b, y=out["y"], scratch=poisoned(linear_workspace(x, w, backward=False)))
    linear_bwd(dy, x, w, dx=out["dx"], dw=out["dw"], db=out.get("db"), heads=heads, scratch=scratch)
    return out


def check(n: int, cin: int, cout: int, dtype: torch.dtype, bias: bool) -> None:
    inputs: dict[str, Any] = {
        "x": randn(n, cin, dtype=dtype),
        "w": randn(cout, cin, dtype=dtype),
        "b": randn(cout, dtype=dtype) if bias else None,
    }
    dy = randn(n, cout, dtype=dtype, seed=1)
    assert_true(run(inputs, dy), dense, inputs, {"y": dy}, bounds.linear(**inputs, dy=dy))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", RAGGED)
def test_dense_layers_agree_with_autograd(dtype: torch.dtype, n: int) -> None:
    check(n, 37, 50, dtype, bias=True)
    check(n, 64, 1, dtype, bias=False)


def test_gradients_of_many_rows_agree_with_autograd() -> None:
    """Sums over rows are as close as those of torch, which are pairwise."""
    check(4095, 8, 100, torch.float32, bias=True)


@pytest.mark.parametrize("tiles", [(16, 32), (7, 5)])
@pytest.mark.parametrize("products", [False, True])
def test_bfloat16_layers_in_tiles_agree_with_autograd(
    monkeypatch: pytest.MonkeyPatch, tiles: tuple[int, int], products: bool
) -> None:
    in_tiles_of(monkeypatch, *tiles)
    monkeypatch.setattr(linear, "_has_bf16_products", lambda: products)
    check(33, 20, 67, torch.bfloat16, bias=True)
    check(33, 20, 67, torch.bfloat16, bias=False)


@pytest.mark.parametrize(
    ("one_dnn", "avx512", "avx512_bf16", "products"),
    [(True, True, True, True), (True, True, False, False), (True, False, False, True), (False, False, False, False)],
    ids=["AMX or Zen 4", "Cascade Lake", "aarch64 with bf16", "AVX2 or Neoverse N1"],
)
def test_products_of_bfloat16_are_torchs_only_where_the_cpu_has_instructions_for_them(
    monkeypatch: pytest.MonkeyPatch, *, one_dnn: bool, avx512: bool, avx512_bf16: bool, products: bool
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: one_dnn)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    assert linear._has_bf16_products.__wrapped__() is products


@pytest.mark.parametrize("products", [False, True])
def test_float32_weights_of_bfloat16_layers_are_rounded_where_products_are_bf16(
    monkeypatch: pytest.MonkeyPatch, products: bool
) -> None:
    """Weights are rounded where products are bf16, to the same bits as weights rounded before; elsewhere they are not."""
    monkeypatch.setattr(linear, "_has_bf16_products", lambda: products)
    in_tiles_of(monkeypatch, 512, 16)
    x, dy = randn(19, 30, dtype=torch.bfloat16), randn(19, 40, dtype=torch.bfloat16, seed=1)
    wide = {"x": x, "w": randn(40, 30, dtype=torch.float32), "b": randn(40, dtype=torch.float32)}
    rounded = {name: value.bfloat16() for name, value in wide.items()}
    got, want = run(wide, dy), run(rounded, dy)
    assert_true(got, dense, wide, {"y": dy}, bounds.linear(**wide, dy=dy))
    assert not products or all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("products", [False, True])
def test_gradients_that_do_not_accumulate_overwrite(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, products: bool, heads: bool
) -> None:
    in_tiles_of(monkeypatch, 8, 5)
    monkeypatch.setattr(linear, "_has_bf16_products", lambda: products)
    h, d = 3, 7
    x, dy = randn(20, h * d, dtype=dtype), randn(20, h * d, dtype=dtype, seed=1)
    w = randn(h, d, d, dtype=dtype) if heads else randn(h * d, h * d, dtype=dtype)
    want = run({"x": x, "w": w, "b": w[..., 0]}, dy, heads=heads)
    got: dict[str, Any] = {name: torch.full_like(want[name], torch.nan) for name in ("dw", "db")}
    linear_bwd(dy, x, w, **got, accumulate=False, heads=heads, scratch=poisoned(linear_workspace(x, w, backward=True)))
    assert all(torch.equal(got[name], want[name]) for name in got)


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("products", [False, True])
def test_the_input_half_accumulates_dx_on_request(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, products: bool, heads: bool
) -> None:
    """dx += dy w is rounded once at the end, and once before if torch's product rounds to bf16."""
    in_tiles_of(monkeypatch, 8, 5)
    monkeypatch.setattr(linear, "_has_bf16_products", lambda: products)
    h, d = 3, 7
    dy, dx0 = randn(20, h * d, dtype=dtype), randn(20, h * d, dtype=dtype, seed=1)
    w = randn(h, d, d, dtype=dtype) if heads else randn(h * d, h * d, dtype=dtype)
    run, dx = per_head_linear_bwd_input if heads else linear_bwd_input, dx0.clone()
    scratch = poisoned(linear_workspace(dy, w, backward=True))
    run(dy, w, dx=dx, accumulate=True, scratch=scratch)
    whole = torch.block_diag(*w) if heads else w
    product = bounds.of(dy) @ bounds.of(whole)
    total = (product.rounded(dtype) if dtype == torch.bfloat16 and products else product) + bounds.of(dx0)
    exact = dx0.double() + dy.double() @ whole.double()
    assert_close({"dx": dx}, {"dx": exact}, bounds.bounds(dtype, {"dx": total}))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("products", [False, True])
def test_without_rows_gradients_add_zero_or_become_zero(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, products: bool
) -> None:
    monkeypatch.setattr(linear, "_has_bf16_products", lambda: products)
    x, w, dy = torch.zeros(0, 6, dtype=dtype), randn(5, 6, dtype=dtype), torch.zeros(0, 5, dtype=dtype)
    for accumulate in (True, False):
        dw, db = torch.ones(5, 6, dtype=acc(dtype)), torch.ones(5, dtype=acc(dtype))
        scratch = poisoned(linear_workspace(x, w, backward=True))
        linear_bwd(dy, x, w, dx=x.clone(), dw=dw, db=db, accumulate=accumulate, scratch=scratch)
        assert bool((dw == float(accumulate)).all()) and bool((db == float(accumulate)).all())


def test_scratch_is_a_tile_of_each_operand_that_is_converted() -> None:
    """x (600, 3), w (1100, 3): tiles of 512 rows and 1024 columns of y."""
    x, w = torch.empty(600, 3, dtype=torch.bfloat16), torch.empty(1100, 3, dtype=torch.bfloat16)
    f, h = torch.float32, torch.bfloat16
    in_tiles = {"x32": ((512, 3), f), "y32": ((512, 1024), f)}
    assert tiled.workspace(x, w.float(), backward=False, bias=True) == in_tiles
    assert tiled.workspace(x, w, backward=False, bias=True) == in_tiles | {"w32": ((1024, 3), f)}
    assert tiled.workspace(x[:7], w[:9].float(), backward=True, bias=True) == {
        "x32": ((7, 3), f), "y32": ((7, 9), f), "dx32": ((7, 3), f),
    }  # fmt: skip
    of_dw = {"dw16": ((1024, 3), h), "dw32": ((1024, 3), f)}
    assert (
        bf16.workspace(x, w, backward=False, bias=True) == {}
        and bf16.workspace(x, w, backward=True, bias=True) == of_dw
    )
    rounded = {"w16": ((1100, 3), h)}
    assert bf16.workspace(x, w.float(), backward=False, bias=True) == rounded | {"b16": ((1100,), h)}
    assert bf16.workspace(x, w.float(), backward=False, bias=False) == rounded
    assert bf16.workspace(x, w.float(), backward=True, bias=True) == rounded | of_dw


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_per_head_layers_agree_with_autograd(dtype: torch.dtype, bias: bool) -> None:
    h, d, n = 3, 21, 63
    inputs: dict[str, Any] = {
        "x": randn(n, h * d, dtype=dtype),
        "w": randn(h, d, d, dtype=dtype),
        "b": randn(h, d, dtype=dtype) if bias else None,
    }
    dy = randn(n, h * d, dtype=dtype, seed=1)
    assert_true(run(inputs, dy, heads=True), per_head, inputs, {"y": dy}, bounds.per_head_linear(**inputs, dy=dy))


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_rows_have_the_results_of_contiguous_ones(dtype: torch.dtype) -> None:
    """The q part of a fused projection is a view with longer rows. x, y, dy and dx may be such views too."""
    x, dy = randn(30, 90, dtype=dtype)[:, 20:57], randn(30, 200, dtype=dtype, seed=1)[:, 100:150]
    inputs = {"x": x, "w": randn(50, 37, dtype=dtype), "b": randn(50, dtype=dtype)}
    w, b = inputs["w"], inputs["b"]
    out = {
        "y": torch.full((30, 64), torch.nan, dtype=dtype)[:, 3:53],
        "dx": torch.full((30, 64), torch.nan, dtype=dtype)[:, 3:40],
        "dw": torch.zeros(50, 37, dtype=acc(dtype)),
        "db": torch.zeros(50, dtype=acc(dtype)),
    }
    scratch = poisoned(linear_workspace(x, w, backward=True) | linear_workspace(x, w, backward=False))
    linear_fwd(x, w, b, y=out["y"], scratch=scratch)
    linear_bwd(dy, x, w, dx=out["dx"], dw=out["dw"], db=out["db"], scratch=scratch)
    assert_true(out, dense, inputs, {"y": dy}, bounds.linear(**inputs, dy=dy))


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameter_gradients_accumulate_and_none_is_not_computed(dtype: torch.dtype) -> None:
    inputs = {"x": randn(20, 30, dtype=dtype), "w": randn(40, 30, dtype=dtype), "b": randn(40, dtype=dtype)}
    dy = randn(20, 40, dtype=dtype, seed=1)
    once = run(inputs, dy)
    scratch = poisoned(linear_workspace(inputs["x"], inputs["w"], backward=True))
    for name in ("dx", "dw", "db"):
        again = once[name].clone()
        linear_bwd(dy, inputs["x"], inputs["w"], scratch=scratch, **cast(Any, {name: again}))
        want = once[name] if name == "dx" else 2 * once[name]
        assert (again - want).abs().max() <= 1e-6 * want.abs().max(), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_layers_allocate_no_memory(dtype: torch.dtype) -> None:
    n, h, d = 60, 4, 32
    allowed = allowed_bytes(dtype, (n, h * d, 96), (n, d, d))
    x, w, b, dy = (
        randn(n, h * d, dtype=dtype),
        randn(96, h * d, dtype=dtype),
        randn(96, dtype=dtype),
        randn(n, 96, dtype=dtype),
    )
    y, dx, dw, db = dy.clone(), x.clone(), w.to(acc(dtype)), b.to(acc(dtype))
    scratch = poisoned(linear_workspace(x, w, backward=True) | linear_workspace(x, w, backward=False))
    assert allocated_bytes(lambda: linear_fwd(x, w, b, y=y, scratch=scratch)) <= allowed
    assert allocated_bytes(lambda: linear_fwd(x, w, None, y=y, scratch=scratch)) <= allowed
    assert allocated_bytes(lambda: linear_bwd(dy, x, w, dx=dx, dw=dw, db=db, scratch=scratch)) <= allowed
    ws, bs = randn(h, d, d, dtype=dtype), randn(h, d, dtype=dtype)
    dws, dbs, y = ws.to(acc(dtype)), bs.to(acc(dtype)), x.clone()
    scratch = poisoned(linear_workspace(x, ws, backward=True) | linear_workspace(x, ws, backward=False))
    assert allocated_bytes(lambda: per_head_linear_fwd(x, ws, bs, y=y, scratch=scratch)) <= allowed
    assert allocated_bytes(lambda: linear_bwd(y, x, ws, dx=dx, dw=dws, db=dbs, heads=True, scratch=scratch)) <= allowed


@pytest.mark.parametrize("dtype", DTYPES)
def test_canary_one_wrong_weight_is_seen(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    right = linear_bwd

    def wrong(dy: Tensor, x: Tensor, w: Tensor, **outputs: Any) -> None:
        w = w.clone()
        w[-1, 0] += 0.5
        right(dy, x, w, **outputs)

    monkeypatch.setitem(globals(), "linear_bwd", wrong)
    with pytest.raises(AssertionError, match="dx: "):
        check(63, 37, 50, dtype, bias=True)


def test_errors_of_linear_layers_say_what_is_accepted() -> None:
    x, w = randn(4, 6), randn(5, 6)
    for fn, match in (
        (lambda: linear_fwd(x, randn(5, 7), None, y=randn(4, 5)), r"w: got .*\(5, 7\).*accepted: .*\(5, 6\)"),
        (lambda: linear_fwd(x, w, randn(6), y=randn(4, 5)), r"b: got .*accepted: .*\(5,\)"),
        (lambda: linear_fwd(x, w, None, y=randn(4, 5).float()), r"y: got .*float32"),
        (lambda: linear_bwd(randn(4, 5), x, w, dw=randn(5, 6).float()), "dw: got .*float32.*accepted: .*float64"),
        (lambda: linear_bwd(randn(5, 4).t(), x, w, db=randn(5)), r"dy: got strides \(1, 4\); accepted: .*last one 1"),
        (lambda: linear_bwd(randn(4, 5), x, w, db=randn(5)), "scratch: column_sum got no 'torch.part'"),
        (
            lambda: linear_bwd(randn(4, 5), x, w, db=randn(5), scratch={"column_sum.torch.part": randn(4)}),
            r"scratch\['torch.part'\].*at least 5",
        ),
        (lambda: per_head_linear_fwd(x, randn(2, 2, 2), None, y=randn(4, 6)), r"w: got \(2, 2, 2\).*H·D = 6"),
    ):
        with pytest.raises(ValueError, match=match):
            fn()


@pytest.mark.parametrize(("name", "factor"), [("y", 1.01), ("dx", 1.01), ("dw", 1.001), ("db", 1.001)])
@pytest.mark.parametrize("products", [False, True])
def test_canary_a_factor_in_bfloat16_is_seen(
    monkeypatch: pytest.MonkeyPatch, products: bool, name: str, factor: float
) -> None:
    monkeypatch.setattr(linear, "_has_bf16_products", lambda: products)
    inputs: dict[str, Any] = {
        name: randn(*shape, dtype=torch.bfloat16) for name, shape in (("x", (63, 37)), ("w", (50, 37)), ("b", (50,)))
    }
    dy = randn(63, 50, dtype=torch.bfloat16, seed=1)
    got = run(inputs, dy)
    with pytest.raises(AssertionError, match=f"{name}: "):
        assert_true({name: got[name] * factor}, dense, inputs, {"y": dy}, bounds.linear(**inputs, dy=dy))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("accumulate", [False, True])
def test_column_sums_are_right(dtype: torch.dtype, accumulate: bool) -> None:
    x, before = randn(113, 90, dtype=dtype)[:, 20:57], randn(37, dtype=acc(dtype), seed=1)
    want = x.double().sum(0) + (before.double() if accumulate else 0.0)
    for row in COLUMN_SUM.rows:
        if row.refuses(table.Problem(x)):
            continue
        sums, scratch = before.clone(), poisoned(column_sum_workspace(x, kernel=row.name))
        column_sum_fwd(x, sums=sums, accumulate=accumulate, scratch=scratch, kernel=row.name)
        assert (sums - want).abs().max() <= 16 * torch.finfo(acc(dtype)).eps * x.double().abs().sum(0).max(), row.name


def test_tables_choose_by_dtype_and_a_name_runs_or_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "blas", lambda: "is switched off")
    for products, want in ((True, "bf16"), (False, "tiled")):
        monkeypatch.setattr(linear, "_has_bf16_products", lambda products=products: products)
        x, w = randn(4, 6, dtype=torch.bfloat16), randn(5, 6, dtype=torch.bfloat16)
        assert LINEAR.select(Problem(x, w)).name == want
        assert LINEAR.select(Problem(x.float(), w.float())).name == "torch"
    y = torch.empty(4, 5, dtype=torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"got 'bf16', which can't run this call: needs a CPU with bf16.*accepted: 'tiled'"
    ):
        linear_fwd(x, w, None, y=y, kernel="bf16")
    with pytest.raises(
        ValueError, match="got 'tiled', which can't run this call: is for bfloat16 on a CPU; accepted: 'torch'"
    ):
        linear_bwd(y.float(), x.float(), w.float(), dx=x.float(), kernel="tiled")
    with pytest.raises(ValueError, match=r"kernel: got 'native', which can't run this call: .*; accepted: 'torch'"):
        column_sum_fwd(randn(4, 5), sums=randn(5), kernel="native")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("n", "cin", "cout"), [(1, 37, 70), (2, 2500, 9), (3, 515, 33), (4, 1, 1)])
def test_products_of_few_rows_in_triton_agree_with_float64(n: int, cin: int, cout: int, dtype: torch.dtype) -> None:
    """Rows have gaps, with and without b, and the product is scaled."""
    pytest.importorskip("triton", reason="needs Triton")
    x, w, b = randn(n, cin + 3, dtype=dtype)[:, :cin], randn(cout, cin, dtype=dtype), randn(cout, dtype=dtype, seed=1)
    exact, y = x.double() @ w.double().t(), bounds.of(x) @ bounds.of(w).mT
    got = {name: torch.full((n, cout + 5), torch.nan, dtype=dtype)[:, :cout] for name in ("y", "y + b", "2y")}
    with interpreting():
        linear_fwd(x, w, None, y=got["y"], kernel="few_rows")
        linear_fwd(x, w, b, y=got["y + b"], kernel="few_rows")
        linear_fwd(x, w, None, y=got["2y"], scale=2.0, kernel="few_rows")
    right = bounds.bounds(dtype, {"y": y, "y + b": y + bounds.of(b), "2y": y * 2.0})
    assert_close(got, {"y": exact, "y + b": exact + b.double(), "2y": 2 * exact}, right)
    with interpreting(), pytest.raises(ValueError, match="is for up to 4 rows"):
        linear_fwd(randn(5, cin, dtype=dtype), w, None, y=torch.empty(5, cout, dtype=dtype), kernel="few_rows")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "cin", "cout"), [(1, 768, 2304), (4, 3072, 768), (3, 8960, 1536), (2, 768, 50257)])
def test_products_of_few_rows_on_the_device_are_right(n: int, cin: int, cout: int, dtype: torch.dtype) -> None:
    """They also run in a graph of a chain: each kernel reads the output of the previous one and starts before that one ends."""
    x, w, b = randn(n, cin, dtype=dtype), randn(cout, cin, dtype=dtype), randn(cout, dtype=dtype, seed=1)
    on_device = [z.cuda() for z in (x, w, b)]
    y = torch.full((n, cout), torch.nan, dtype=dtype, device="cuda")
    linear_fwd(*on_device, y=y, kernel="few_rows")
    exact = bounds.of(x) @ bounds.of(w).mT + bounds.of(b)
    assert_close({"y": y.cpu()}, {"y": x.double() @ w.double().t() + b.double()}, bounds.bounds(dtype, {"y": exact}))
    back = randn(cin, cout, dtype=dtype, seed=2).cuda() / cout**0.5
    buffers = [torch.zeros(n, cin, dtype=dtype, device="cuda") for _ in range(9)]
    ones, rstd = torch.ones(cin, dtype=dtype, device="cuda"), torch.zeros(n, device="cuda")

    def chain() -> None:
        buffers[0].copy_(on_device[0])
        for before, after in pairwise(buffers):
            linear_fwd(before, on_device[1], None, y=y)
            linear_fwd(y, back, None, y=after)
            rmsnorm_fwd(after, ones, 1e-5, y=after, rstd=rstd)

    chain()
    want = [z.clone() for z in buffers]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(20):
        for z in (*buffers, y):
            z.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(buffers, want, strict=True))
