"""The Triton kernels of the ops against the oracle in Triton's interpreter and, if there is one, on a GPU.
test_ops_triton_compile.py compiles them without a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import bounds
from support.fused import check_fused_activation, check_fused_norm
from support.guard import Guard
from support.ops import assert_true, poisoned, randn
from torch import Tensor

from tilegrad.kernels import gpu
from tilegrad.kernels.activation import ACTIVATION, KINDS, activation_bwd, activation_fwd, swiglu_bwd, swiglu_fwd
from tilegrad.kernels.activation import Problem as ActivationProblem
from tilegrad.kernels.adamw import ADAMW
from tilegrad.kernels.adamw import Problem as AdamWProblem
from tilegrad.kernels.closeness import assert_close
from tilegrad.kernels.column_sum import COLUMN_SUM, column_sum_fwd, column_sum_workspace
from tilegrad.kernels.cross_entropy import CROSS_ENTROPY
from tilegrad.kernels.cross_entropy import Problem as LossProblem
from tilegrad.kernels.dropout import DROPOUT
from tilegrad.kernels.embedding import EMBEDDING
from tilegrad.kernels.global_norm import GLOBAL_NORM
from tilegrad.kernels.mix import MIX
from tilegrad.kernels.norm import (
    MOST_COLUMNS,
    NORM,
    layernorm_bwd,
    layernorm_fwd,
    norm_workspace,
    rmsnorm_bwd,
    rmsnorm_fwd,
)
from tilegrad.kernels.op import observe
from tilegrad.kernels.rope import ROPE
from tilegrad.kernels.scaled_sum import SCALED_SUM
from tilegrad.kernels.scratch import Form
from tilegrad.kernels.table import Problem, Table

pytest.importorskip("triton", reason="needs Triton")
DTYPES = (torch.float32, torch.float16)  # the interpreter truncates to bfloat16, the compiler rounds
SHAPES = ((1, 1), (63, 63), (37, 300), (263, 5), (9, 1000), (3, 4097))
ON_THE_DEVICE = ((16384, 768), (5000, 2048), (1001, 8192))
# shape → activations. The wide shapes have several tiles per program. All activations but swiglu differ only in the
# function of a number, which the oracle checks at every shape.
FUSED: dict[tuple[int, int], tuple[str, ...]] = {
    (1, 1): ("gelu",),
    (63, 63): ("tanh",),
    (263, 5): ("relu",),
    (4000, 768): (*KINDS, "swiglu"),
    (2200, 2048): ("relu2",),
    (300, 8100): ("swiglu",),
}
NORMS = ((True, False), (False, True), (False, False))  # RMS norm, bias
EPS = 1e-5
Outputs = dict[str, Tensor]


def apart(n: int, c: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Tensor:
    """A copy whose rows have gaps and whose columns are contiguous."""
    return randn(n, 2 * c, dtype=dtype, seed=seed).to(device)[:, c:]


def nans(like: Tensor) -> Tensor:
    """NaN in rows that have other gaps."""
    n, c = like.shape
    return torch.full((n, c + 3), torch.nan, dtype=like.dtype, device=like.device)[:, 1 : c + 1]


def spoiled(shapes: Any, x: Tensor) -> Outputs:
    return {name: buffer.to(x.device) for name, buffer in poisoned(shapes).items()}


def layernorm(x: Tensor, w: Tensor, b: Tensor | None) -> Outputs:
    mean = x.mean(-1, keepdim=True)
    rstd = ((x - mean).square().mean(-1, keepdim=True) + EPS).rsqrt()
    y = (x - mean) * rstd * w
    return {"y": y if b is None else y + b, "mean": mean[:, 0], "rstd": rstd[:, 0]}


def rmsnorm(x: Tensor, w: Tensor, b: None) -> Outputs:
    assert b is None
    rstd = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return {"y": x * rstd * w, "rstd": rstd[:, 0]}


def norm_inputs(
    n: int, c: int, dtype: torch.dtype, *, bias: bool, device: str = "cpu"
) -> tuple[dict[str, Any], Tensor]:
    w, b = (randn(c, dtype=dtype, seed=seed).to(device) for seed in (0, 2))
    x, dy = (apart(n, c, dtype, device, seed=seed) for seed in (0, 1))
    return {"x": x + 0.5, "w": w, "b": b if bias else None}, dy


def run_norm(inputs: dict[str, Any], dy: Tensor, *, rms: bool) -> Outputs:
    x, w, b = inputs["x"], inputs["w"], inputs["b"]
    assert x is not None and w is not None
    n, c = x.shape
    forward, backward = (spoiled(norm_workspace(x, backward=which, kernel="triton"), x) for which in (False, True))

    def wide(size: int) -> Tensor:
        return torch.full((size,), torch.nan, dtype=torch.float32, device=x.device)

    out = {"y": nans(x), "rstd": wide(n)}
    dx = nans(x).zero_()
    if rms:
        grads = {"dw": wide(c)}
        rmsnorm_fwd(x, w, EPS, **out, scratch=forward, kernel="triton")
        rmsnorm_bwd(
            dy, x, w, out["rstd"], dx=dx, **grads, accumulate=False, scratch=backward, kernel="triton"
        )  # fmt: skip
        return out | grads | {"dx": dx}
    out["mean"] = wide(n)
    grads = {name: wide(c) for name in (("dw",) if b is None else ("dw", "db"))}
    layernorm_fwd(x, w, b, EPS, **out, scratch=forward, kernel="triton")
    layernorm_bwd(
        dy, x, w, out["mean"], out["rstd"], dx=dx, **grads, accumulate=False, scratch=backward, kernel="triton"
    )
    return out | grads | {"dx": dx}


def check_norm(got: Outputs, inputs: dict[str, Any], dy: Tensor, *, rms: bool) -> None:
    allowed = bounds.norm(**inputs, dy=dy, eps=EPS, rms=rms)
    assert_true(got, rmsnorm if rms else layernorm, inputs, {"y": dy}, allowed)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "c"), SHAPES)
@pytest.mark.parametrize(("rms", "bias"), NORMS)
def test_interpreted_norms_agree_with_the_oracle(n: int, c: int, dtype: torch.dtype, rms: bool, bias: bool) -> None:
    inputs, dy = norm_inputs(n, c, dtype, bias=bias)
    check_norm(run_norm(inputs, dy, rms=rms), inputs, dy, rms=rms)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize(("rms", "bias"), NORMS)
def test_norms_on_the_device_agree_with_the_oracle(dtype: torch.dtype, rms: bool, bias: bool) -> None:
    for n, c in (*SHAPES, *ON_THE_DEVICE, (300, MOST_COLUMNS)):
        inputs, dy = norm_inputs(n, c, dtype, bias=bias, device="cuda")
        got = run_norm(inputs, dy, rms=rms)
        check_norm(got, inputs, dy, rms=rms)
        again = run_norm(inputs, dy, rms=rms)
        assert all(torch.equal(got[name], again[name]) for name in got), (n, c)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("c", [MOST_COLUMNS, 2049])
def test_interpreted_norms_of_long_rows_agree_with_the_oracle(c: int) -> None:
    inputs, dy = norm_inputs(3, c, torch.float16, bias=True)
    check_norm(run_norm(inputs, dy, rms=False), inputs, dy, rms=False)


@pytest.mark.usefixtures("interpreter")
def test_interpreted_large_mean_does_not_cancel_digits() -> None:
    inputs, dy = norm_inputs(63, 48, torch.float32, bias=True)
    inputs["x"] = inputs["x"] + 1000.0
    check_norm(run_norm(inputs, dy, rms=False), inputs, dy, rms=False)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("rms", [False, True])
def test_interpreted_gradients_accumulate_and_may_be_requested_one_at_a_time(rms: bool) -> None:
    inputs, dy = norm_inputs(300, 20, torch.float32, bias=not rms)
    x, w, once = inputs["x"], inputs["w"], run_norm(inputs, dy, rms=rms)
    assert x is not None and w is not None
    scratch = poisoned(norm_workspace(x, backward=True, kernel="triton"))
    for name in ("dx", "dw") if rms else ("dx", "dw", "db"):
        twice: Any = {name: once[name].clone(), "scratch": scratch, "kernel": "triton"}
        if rms:
            rmsnorm_bwd(dy, x, w, once["rstd"], **twice)
        else:
            layernorm_bwd(dy, x, w, once["mean"], once["rstd"], **twice)
        assert torch.equal(twice[name], 2 * once[name]), name


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("rms", [False, True])
def test_interpreted_norms_may_have_no_rows(rms: bool) -> None:
    inputs, dy = norm_inputs(0, 5, torch.float32, bias=not rms)
    got = run_norm(inputs, dy, rms=rms)
    assert torch.equal(got["dw"], torch.zeros(5)) and got["y"].shape == (0, 5)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("rms", [False, True])
def test_interpreted_canary_a_forgotten_program_is_seen(monkeypatch: pytest.MonkeyPatch, rms: bool) -> None:
    """The forgotten program has the backward's last partial sums, or the forward's last rows."""
    from tilegrad.kernels.column_sum import triton_ops as column_sum_ops
    from tilegrad.kernels.norm import triton_ops

    inputs, dy = norm_inputs(63, 768, torch.float16, bias=not rms)
    right = column_sum_ops.add_partials

    def but_the_last(partials: Tensor, *sums: Tensor, accumulate: bool) -> None:
        right(partials[:, :-1].contiguous(), *sums, accumulate=accumulate)

    monkeypatch.setattr(triton_ops, "add_partials", but_the_last)
    got = run_norm(inputs, dy, rms=rms)
    check_norm({name: got[name] for name in ("y", "dx")}, inputs, dy, rms=rms)
    for name in ("dw",) if rms else ("dw", "db"):
        with pytest.raises(AssertionError, match=f"{name}: "):
            check_norm({name: got[name]}, inputs, dy, rms=rms)
    monkeypatch.setattr(triton_ops, "ceil_div", lambda a, b: a // b)
    got = run_norm(inputs, dy, rms=rms)
    with pytest.raises(AssertionError, match="y: NaN"):
        check_norm({"y": got["y"]}, inputs, dy, rms=rms)


def check_column_sums(x: Tensor) -> None:
    sums = torch.full(x.shape[1:], torch.nan, device=x.device)
    scratch = spoiled(column_sum_workspace(x, kernel="triton"), x)
    column_sum_fwd(x, sums=sums, accumulate=False, scratch=scratch, kernel="triton")
    allowed = bounds.bounds(x.dtype, {"sums": bounds.of(x).sum(0)})
    exact = {"sums": x.double().sum(0)}
    assert_close({"sums": sums}, exact, allowed)
    twice = sums.clone()
    column_sum_fwd(x, sums=twice, scratch=scratch, kernel="triton")
    assert torch.equal(twice, 2 * sums)
    if x.shape[0] > 1:
        sums[0] += float(x[0, 0].abs()) + 0.1
        with pytest.raises(AssertionError, match="sums: "):
            assert_close({"sums": sums}, exact, allowed)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "c"), [*SHAPES, (5000, 63), (0, 7)])
def test_interpreted_column_sums_are_right(n: int, c: int, dtype: torch.dtype) -> None:
    check_column_sums(apart(n, c, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
def test_column_sums_on_the_device_are_right(dtype: torch.dtype) -> None:
    for n, c in (*SHAPES, *ON_THE_DEVICE, (3, 70_000)):
        check_column_sums(apart(n, c, dtype, "cuda"))


def uncancelled_tanh(h: Tensor) -> Outputs:
    """tanh as ±(1 − 2 σ(−2|h|)): for |h| > 10 autograd's 1 − tanh² in float64 is wrong by as much as float32 rounds."""
    return {"a": torch.where(h < 0, -1.0, 1.0) * (1 - 2 * torch.sigmoid(-2 * h.abs()))}


FORMULAS = {
    "gelu": lambda h: {"a": 0.5 * h * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * h**3)))},
    "tanh": uncancelled_tanh,
    "relu": lambda h: {"a": torch.relu(h)},
    "relu2": lambda h: {"a": torch.relu(h).square()},
}


def run_activation(kind: str, h: Tensor, da: Tensor) -> Outputs:
    a, dh = nans(h), nans(h)
    activation_fwd(h, kind, a=a, kernel="triton")
    activation_bwd(da, h, kind, dh=dh, kernel="triton")
    return {"a": a, "dh": dh}


def check_activation(kind: str, h: Tensor, da: Tensor) -> None:
    """Checks rows with gaps and one row in place, and that one wrong number is seen."""
    got, allowed = run_activation(kind, h, da), bounds.activation(kind, h, da)
    assert_true(got, FORMULAS[kind], {"h": h}, {"a": da}, allowed)
    flat, in_place = torch.empty_like(h.reshape(-1)), da.contiguous()
    activation_fwd(h.reshape(-1), kind, a=flat, kernel="triton")
    activation_bwd(in_place, h.contiguous(), kind, dh=in_place, kernel="triton")
    assert torch.equal(flat.view(h.shape), got["a"]) and torch.equal(in_place, got["dh"])
    for name in ("a", "dh"):
        wrong = got[name].clone()
        wrong[-1, -1] += 0.2
        with pytest.raises(AssertionError, match=f"{name}: "):
            assert_true({name: wrong}, FORMULAS[kind], {"h": h}, {"a": da}, allowed)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_interpreted_activations_agree_with_the_oracle(kind: str, dtype: torch.dtype) -> None:
    for n, c in SHAPES:
        check_activation(kind, 3 * apart(n, c, dtype), apart(n, c, dtype, seed=1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_activations_on_the_device_agree_with_the_oracle(kind: str, dtype: torch.dtype) -> None:
    for n, c in (*SHAPES, *ON_THE_DEVICE):
        check_activation(kind, 3 * apart(n, c, dtype, "cuda"), apart(n, c, dtype, "cuda", seed=1))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_interpreted_activations_of_large_inputs_equal_their_asymptotes_and_nan_stays(
    kind: str, dtype: torch.dtype
) -> None:
    h = torch.tensor([[-3e38, -1e20, -1e4, -200.0, 200.0, 1e4, 1e20, 3e38, torch.nan]], dtype=torch.float32)
    h = h.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    got = run_activation(kind, h, torch.ones_like(h))
    far, ones = h[0, 4:8], torch.ones(4, dtype=dtype)
    left = -1.0 if kind == "tanh" else 0.0
    right, slope = {"tanh": (ones, 0 * ones), "relu2": (far.square(), 2 * far)}.get(kind, (far, ones))
    assert torch.equal(got["a"][0, :4], torch.full((4,), left, dtype=dtype))
    assert torch.equal(got["a"][0, 4:8], right)
    assert torch.equal(got["dh"][0, :4], torch.zeros(4, dtype=dtype))
    assert torch.equal(got["dh"][0, 4:8], slope)
    assert got["a"][0, 8].isnan() and (kind == "relu" or got["dh"][0, 8].isnan())


def swiglu(gate: Tensor, up: Tensor) -> Outputs:
    return {"a": gate * torch.sigmoid(gate) * up}


def check_swiglu(n: int, c: int, dtype: torch.dtype, device: str) -> None:
    up_gate, da = (3 * randn(n, 2 * c, dtype=dtype)).to(device), randn(n, c, dtype=dtype, seed=1).to(device)
    a, dup_gate = (torch.full_like(x, torch.nan) for x in (da, up_gate))
    swiglu_fwd(up_gate, a=a, kernel="triton")
    swiglu_bwd(da, up_gate, dup_gate=dup_gate, kernel="triton")
    (up, gate), (dup, dgate) = up_gate.chunk(2, 1), dup_gate.chunk(2, 1)
    got = {"a": a, "dgate": dgate, "dup": dup}
    allowed = bounds.swiglu(gate, up, da)
    assert_true(got, swiglu, {"gate": gate, "up": up}, {"a": da}, allowed)
    again, in_place = da.clone(), up_gate.clone()
    swiglu_bwd(again, in_place, dup_gate=in_place, a=again, kernel="triton")
    assert torch.equal(in_place, dup_gate) and torch.equal(again, a)
    for name in got:
        wrong = got[name].clone()
        wrong[-1, -1] += 0.2 + wrong[-1, -1].abs()
        with pytest.raises(AssertionError, match=f"{name}: "):
            assert_true({name: wrong}, swiglu, {"gate": gate, "up": up}, {"a": da}, allowed)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rms", "bias"), NORMS)
def test_interpreted_norms_can_add_a_branch_recompute_the_output_and_sum_dx(
    dtype: torch.dtype, rms: bool, bias: bool
) -> None:
    for n, c in ((1, 1), (63, 63), (37, 48), (9, 768)):
        check_fused_norm(n, c, dtype, rms=rms, bias=bias, device="cpu", kernel="triton")


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*KINDS, "swiglu"])
def test_interpreted_backward_can_recompute_the_output_and_sum_gradients(kind: str, dtype: torch.dtype) -> None:
    for n, c in ((1, 1), (63, 63), (9, 1500)):
        check_fused_activation(kind, n, c, dtype, device="cpu", kernel="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "c"), FUSED)
def test_fused_ops_on_the_device_have_the_results_of_their_pieces(n: int, c: int, dtype: torch.dtype) -> None:
    for rms, bias in NORMS:
        check_fused_norm(n, c, dtype, rms=rms, bias=bias, device="cuda", kernel="triton")
    for kind in FUSED[n, c]:
        check_fused_activation(kind, n, c, dtype, device="cuda", kernel="triton")


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
def test_interpreted_swiglu_agrees_with_the_oracle(dtype: torch.dtype) -> None:
    for n, c in SHAPES:
        check_swiglu(n, c, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
def test_swiglu_on_the_device_agrees_with_the_oracle(dtype: torch.dtype) -> None:
    for n, c in (*SHAPES, *ON_THE_DEVICE):
        check_swiglu(n, c, dtype, "cuda")


@pytest.mark.usefixtures("interpreter")
def test_interpreted_kernels_write_only_their_buffers() -> None:
    guard = Guard()
    with observe(guard):
        for rms in (False, True):
            inputs, dy = norm_inputs(13, 20, torch.float32, bias=not rms)
            run_norm(inputs, dy, rms=rms)
        check_column_sums(apart(13, 20, torch.float32))
        run_activation(KINDS[0], apart(13, 20, torch.float32, seed=1), apart(13, 20, torch.float32, seed=2))
        check_swiglu(13, 20, torch.float32, "cpu")
    assert guard.calls >= 9


@pytest.mark.usefixtures("interpreter")
def test_interpreted_scratch_never_shrinks_with_more_rows() -> None:
    for c in (1, 63, 768, 5000):
        rows = [torch.empty(n, c) for n in (0, 1, 100, 5000)]
        for sizes in (
            [norm_workspace(x, backward=True, kernel="triton") for x in rows],
            [column_sum_workspace(x, kernel="triton") for x in rows],
        ):
            shapes = [size["triton.partials"][0] for size in sizes]
            assert shapes == sorted(shapes) and shapes[0] < shapes[-1]


def test_the_tables_say_why_triton_cannot_run_an_op() -> None:
    x = randn(4, 6, dtype=torch.float32)
    for table, problem in (
        (NORM, Problem),
        (COLUMN_SUM, Problem),
        (ACTIVATION, lambda x: ActivationProblem(x, "gelu")),
    ):
        assert "TRITON_INTERPRET=1" in table.explain(problem(x)).reasons["triton"]
        assert "float64" in table.explain(problem(x.double())).reasons["triton"]


@pytest.mark.usefixtures("interpreter")
def test_interpreted_tables_say_which_layouts_are_accepted() -> None:
    assert "up to 16384 columns, not 16385" in NORM.explain(Problem(torch.empty(1, 16385))).reasons["triton"]
    across = torch.empty(6, 4).t()
    told = ACTIVATION.explain(ActivationProblem(across, "gelu"))
    assert "contiguous columns" in told.reasons["triton"]


TABLES = (CROSS_ENTROPY, ADAMW, GLOBAL_NORM, EMBEDDING, ROPE, DROPOUT, MIX, SCALED_SUM)


def problem_of(table: Table, dtype: torch.dtype) -> Any:
    x = Form((64, 64), dtype, torch.device("cpu"))
    if table is ADAMW:
        return AdamWProblem(x)
    return LossProblem(x, x) if table is CROSS_ENTROPY else Problem(x)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.op)
def test_the_fixture_kernels_runs_the_kernels_of_triton(table: Table, kernels: str) -> None:
    """Otherwise the tests with that fixture would run torch's kernels twice."""
    for dtype in (torch.float32, torch.bfloat16):
        assert table.select(problem_of(table, dtype)).name == kernels
    assert table.select(problem_of(table, torch.float64)).name == "torch"


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.op)
def test_a_cpu_refuses_tritons_kernels_and_says_why(table: Table) -> None:
    with pytest.raises(ValueError, match="kernel: got 'triton', which can't run this call: needs a CUDA device"):
        table.select(problem_of(table, torch.float32), "triton")
    with pytest.raises(ValueError, match="bfloat16 and float32"):
        table.select(problem_of(table, torch.float64), "triton")


def test_the_loss_in_triton_refuses_float16() -> None:
    with pytest.raises(ValueError, match="underflows in float16; accepted: 'torch'"):
        CROSS_ENTROPY.select(problem_of(CROSS_ENTROPY, torch.float16), "triton")


def test_an_old_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = Form((1, 1), torch.bfloat16, torch.device("cuda", 0))
    for found, refused in (((7, 5), True), ((8, 0), False), ((9, 0), False)):
        monkeypatch.setattr(gpu, "capability", lambda _device, found=found: found)
        gpu._refusal.cache_clear()
        told = gpu.refusal(x)
        assert (told is not None) == refused
        assert told is None or "needs compute capability 8.0 or newer; cuda:0 has 7.5" in told
    gpu._refusal.cache_clear()
    monkeypatch.setattr(gpu, "has_triton", lambda: False)
    assert "needs Triton" in str(gpu.refusal(x))
    gpu._refusal.cache_clear()


def test_each_call_checks_whether_the_interpreter_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is refused without it is accepted with it, then refused again."""
    x = torch.empty(1)
    for value, refused in (("0", True), ("1", False), ("0", True)):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        assert (gpu.refusal(x) is not None) == refused


def test_grids_and_tiles_have_their_sizes() -> None:
    assert [gpu.ceil_div(a, 4) for a in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
    assert [gpu.padded(n) for n in (0, 1, 2, 3, 4, 5, 1024, 1025)] == [1, 1, 2, 4, 4, 8, 1024, 2048]
    assert gpu.multiprocessors(torch.device("cpu")) == 8
