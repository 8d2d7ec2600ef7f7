"""The scaled sum of two streams: against autograd, in every kernel."""

from __future__ import annotations

import pytest
import torch
from support import bounds
from support.ops import DTYPES, acc, assert_factors_are_seen, assert_true, poisoned, randn
from torch import Tensor

from tilegrad.kernels import gpu
from tilegrad.kernels.scaled_sum import SCALED_SUM, scaled_sum_bwd, scaled_sum_fwd, scaled_sum_workspace
from tilegrad.kernels.scaled_sum import torch_ops as scaled_sum_torch_ops
from tilegrad.kernels.scratch import Form
from tilegrad.kernels.table import Problem

SHAPES = ((1, 1), (63, 5), (113, 64), (300, 48))


def formula(x: Tensor, x0: Tensor, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    return {"y": a * x + b * x0}


def given(n: int, c: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    x, x0, dy = (randn(n, c, dtype=dtype, seed=seed) for seed in range(3))
    return {"x": x, "x0": x0, "a": torch.tensor([-1.25], dtype=dtype), "b": torch.tensor([0.375], dtype=dtype)}, dy


def run(inputs: dict[str, Tensor], dy: Tensor, kernel: str | None = None) -> dict[str, Tensor]:
    """dx over dy; dx0, da and db are added to earlier values of 0, which no rounding changes."""
    x, wide = inputs["x"], acc(dy.dtype)
    y, dx, dx0 = torch.full_like(x, torch.nan), dy.clone(), torch.zeros_like(x)
    da, db = torch.zeros(1, dtype=wide), torch.zeros(1, dtype=wide)
    forward, backward = (poisoned(scaled_sum_workspace(x, backward=way, kernel=kernel)) for way in (False, True))
    scaled_sum_fwd(*inputs.values(), y=y, scratch=forward, kernel=kernel)
    scaled_sum_bwd(dx, *inputs.values(), dx=dx, dx0=dx0, da=da, db=db, scratch=backward, kernel=kernel)
    return {"y": y, "dx": dx, "dx0": dx0, "da": da, "db": db}


def assert_right(got: dict[str, Tensor], inputs: dict[str, Tensor], dy: Tensor) -> None:
    x, x0, a, b = map(bounds.of, inputs.values())
    g = bounds.of(dy)
    exact = {"y": x * a + x0 * b, "dx": g * a, "dx0": g * b}
    sums = {name: (g * factor).flat().sum(1).sum(0, keepdim=True) for name, factor in (("da", x), ("db", x0))}
    assert_true(got, formula, inputs, {"y": dy}, bounds.bounds(dy.dtype, exact | sums))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [130, 1 << 17])
def test_scaled_sum(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, block: int) -> None:
    if gpu.interpreting() and block == 130:
        pytest.skip("Triton's kernel has no such blocks")
    monkeypatch.setitem(scaled_sum_torch_ops.BLOCK, "cpu", block)
    for n, c in SHAPES:
        inputs, dy = given(n, c, dtype)
        assert_right(run(inputs, dy), inputs, dy)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_added_or_overwritten_and_none_is_left_out(dtype: torch.dtype) -> None:
    inputs, dy = given(63, 48, dtype)
    want, scratch = run(inputs, dy), poisoned(scaled_sum_workspace(dy, backward=True))
    da, db = (torch.full((1,), torch.nan, dtype=acc(dtype)) for _ in range(2))
    dx = torch.empty_like(dy)
    scaled_sum_bwd(dy, *inputs.values(), dx=dx, da=da, accumulate=False, scratch=scratch)
    scaled_sum_bwd(dy, *inputs.values(), dx=dx, db=db, accumulate=False, scratch=scratch)
    assert torch.equal(dx, want["dx"]) and torch.equal(da, want["da"]) and torch.equal(db, want["db"])
    dx0 = want["dx0"].clone()
    scaled_sum_bwd(dy, *inputs.values(), dx=dx, dx0=dx0, da=da, db=db, scratch=scratch)
    assert torch.equal(dx0, 2 * want["dx0"])
    assert torch.equal(da, 2 * want["da"]) and torch.equal(db, 2 * want["db"])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [64, 112])  # 48 in wider rows
def test_columns_of_wider_rows_and_no_b_give_the_bits_of_rows_and_1(dtype: torch.dtype, columns: int) -> None:
    inputs, dy = given(113, 48, dtype)
    inputs["b"] = torch.ones(1, dtype=dtype)
    want, wide, wide_dy = run(inputs, dy), *(torch.full((113, columns), 7.0, dtype=dtype) for _ in range(2))
    y, g = wide[:, -48:], wide_dy[:, -48:]
    y.copy_(inputs["x0"])
    g.copy_(dy)
    x, a = inputs["x"], inputs["a"]
    scaled_sum_fwd(x, y, a, None, y=y, scratch=poisoned(scaled_sum_workspace(x, backward=False)))
    dx, dx0, da = torch.empty_like(x), torch.zeros_like(x), torch.zeros(1, dtype=acc(dtype))
    scaled_sum_bwd(g, x, None, a, None, dx=dx, dx0=dx0, da=da, scratch=poisoned(scaled_sum_workspace(x, backward=True)))
    got = {"y": y, "dx": dx, "dx0": dx0, "da": da}
    assert all(torch.equal(got[name], want[name]) for name in got)
    assert (wide[:, :-48] == 7).all() and torch.equal(g, dy)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_depend_neither_on_threads_nor_on_the_place(dtype: torch.dtype) -> None:
    inputs, dy = given(1023, 113, dtype)
    before, found = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        found.append(run(inputs, dy))
    torch.set_num_threads(before)
    assert all(torch.equal(found[0][name], x) for name, x in found[1].items())
    for rows in (slice(3, 4), slice(1, 20)):
        some = {name: t[rows] if t.ndim == 2 else t for name, t in inputs.items()}
        assert torch.equal(run(some, dy[rows])["y"], found[0]["y"][rows])


@pytest.mark.usefixtures("kernels")
def test_canary_a_factor_in_bfloat16_is_seen() -> None:
    inputs, dy = given(113, 64, torch.bfloat16)
    assert_factors_are_seen(run(inputs, dy), lambda got: assert_right(got, inputs, dy), 1.005)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scaled_sum_on_the_device(dtype: torch.dtype) -> None:
    for n, c in (*SHAPES, (4096, 768)):
        inputs, dy = given(n, c, dtype)
        inputs, dy = {name: x.cuda() for name, x in inputs.items()}, dy.cuda()
        x, da, db = inputs["x"], *(torch.zeros(1, device="cuda") for _ in range(2))
        y, dx, dx0 = torch.empty_like(x), torch.empty_like(x), torch.zeros_like(x)
        scratch = {
            name: torch.full(shape, torch.nan, dtype=kind, device="cuda")
            for name, (shape, kind) in scaled_sum_workspace(x, backward=True).items()
        }
        scaled_sum_fwd(*inputs.values(), y=y)
        scaled_sum_bwd(dy, *inputs.values(), dx=dx, dx0=dx0, da=da, db=db, scratch=scratch)
        got = {"y": y, "dx": dx, "dx0": dx0, "da": da, "db": db}
        assert_right({name: t.cpu() for name, t in got.items()}, {k: t.cpu() for k, t in inputs.items()}, dy.cpu())


def test_bad_inputs_say_what_is_accepted() -> None:
    inputs, dy = given(4, 6, torch.float64)
    x, x0, a, b = inputs.values()
    scratch = poisoned(scaled_sum_workspace(x, backward=False))
    for fn, match in (
        (lambda: scaled_sum_fwd(x, x0[:3], a, b, y=dy), r"x0: got .*\(3, 6\).*accepted: .*\(4, 6\)"),
        (lambda: scaled_sum_fwd(x, x0, a, b[0], y=dy), r"b: got .*accepted: .*\(1,\)"),
        (lambda: scaled_sum_fwd(x, x0, a, b, y=torch.empty(6, 4, dtype=x.dtype).t()), "y: got strides"),
        (lambda: scaled_sum_fwd(x, x0, a, b, y=dy), "scratch: scaled_sum got no"),
        (lambda: scaled_sum_bwd(dy, x, x0, a, b, dx=dy, da=a.float()), "da: got .*float32"),
        (lambda: scaled_sum_bwd(dy, x, x0.t()[:4], a, b, dx=dy), "x0: got "),
        (lambda: scaled_sum_bwd(dy, x, None, a, b, dx=dy, db=b), "x0: got None; accepted: a tensor, which db needs"),
    ):
        with pytest.raises(ValueError, match=match):
            fn()
    scaled_sum_fwd(x, x0, a, b, y=dy, scratch=scratch)
    on_cpu = SCALED_SUM.select(Problem(Form((4, 6), torch.bfloat16, torch.device("cpu"))))
    assert on_cpu.name == "torch" or gpu.interpreting()
