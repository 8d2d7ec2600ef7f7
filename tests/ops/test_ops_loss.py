"""Cross-entropy and embedding_mse against autograd on whole matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import bounds
from support.interpreter import run_by
from support.ops import (
    DTYPES,
    acc,
    allocated_bytes,
    allowed_bytes,
    assert_factors_are_seen,
    assert_true,
    poisoned,
    randn,
)
from torch import Tensor

from tilegrad.kernels import embedding_mse, gpu, linear
from tilegrad.kernels.activation import activation_fwd
from tilegrad.kernels.closeness import assert_close
from tilegrad.kernels.cpu.library import library
from tilegrad.kernels.cross_entropy import (
    CROSS_ENTROPY,
    Problem,
    chunks,
    cross_entropy_bwd,
    cross_entropy_fwd,
    cross_entropy_workspace,
    torch_ops,
)
from tilegrad.kernels.cross_entropy.softcap import softcap_fwd
from tilegrad.kernels.embedding_mse import (
    embedding_mse_bwd,
    embedding_mse_fwd,
    embedding_mse_workspace,
)

LOSSES = ("cross_entropy", "embedding_mse")


@pytest.fixture(params=[*LOSSES, "cross_entropy, triton"])
def loss(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both losses. Tests that would show nothing new about Triton's kernel have LOSSES as a parameter instead."""
    name, _, kernels = request.param.partition(", ")
    with run_by(kernels, request):
        yield name


def formula_of(loss: str, targets: Tensor, inv_total: float) -> Callable[..., dict[str, Tensor]]:
    kept = targets >= 0

    def formula(x: Tensor, w: Tensor) -> dict[str, Tensor]:
        if loss == "cross_entropy":
            logp = torch.log_softmax(x[kept] @ w.t(), -1)
            each = -logp[torch.arange(int(kept.sum())), targets[kept]]
        else:
            each = (x[kept] - w[targets[kept]]).square().mean(-1)
        return {"loss": each.sum() * inv_total}

    return formula


def assert_right(loss: str, got: dict[str, Tensor], inputs: dict[str, Tensor], targets: Tensor) -> None:
    """Holds `got` to the closeness rule, with inv_total = 1/64."""
    allowed = {"cross_entropy": bounds.cross_entropy, "embedding_mse": bounds.embedding_mse}[loss]
    formula = formula_of(loss, targets, 1 / 64)
    assert_true(got, formula, inputs, {"loss": torch.ones(())}, allowed(**inputs, targets=targets, inv_total=1 / 64))


def build(n: int, c: int, v: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    targets = torch.randint(0, v, (n,), generator=torch.Generator().manual_seed(n))
    targets[::5] = -1
    targets[-1] = v - 1
    return {"x": randn(n, c, dtype=dtype), "w": randn(v, c, dtype=dtype, seed=1)}, targets


def call(kind: str, part: str, inputs: dict[str, Tensor], targets: Tensor, inv_total: Tensor, **outputs: Any) -> None:
    x, w = inputs["x"], inputs["w"]
    fn: Any
    if kind == "cross_entropy":
        fn = cross_entropy_fwd if part == "fwd" else cross_entropy_bwd
        scratch = poisoned(cross_entropy_workspace(x, w, backward=part != "fwd"))
    else:
        fn = embedding_mse_fwd if part == "fwd" else embedding_mse_bwd
        scratch = poisoned(embedding_mse_workspace(x, w))
        if "dw" in outputs:
            outputs["dwte"] = outputs.pop("dw")
    fn(x, w, targets, inv_total, **outputs, scratch=scratch)


def outputs_of(inputs: dict[str, Tensor]) -> dict[str, Any]:
    x, w = inputs["x"], inputs["w"]
    a = acc(x.dtype)
    return {
        "loss": torch.tensor(torch.nan, dtype=a),
        "dx": torch.full_like(x, torch.nan),
        "dw": torch.zeros_like(w, dtype=a),
    }


def run(loss: str, inputs: dict[str, Tensor], targets: Tensor, inv_total: float) -> dict[str, Tensor]:
    """Runs forward and backward in one pass. Alone they must give the same."""
    inv = torch.tensor(inv_total, dtype=acc(inputs["x"].dtype))
    out, alone = outputs_of(inputs), outputs_of(inputs)
    call(loss, "bwd", inputs, targets, inv, **out)
    call(loss, "fwd", inputs, targets, inv, loss=alone["loss"])
    call(loss, "bwd", inputs, targets, inv, dx=alone["dx"], dw=alone["dw"])
    assert all(torch.equal(out[name], alone[name]) for name in out)
    return out


def rows() -> int:
    """More rows than a small chunk has; fewer of them where each is a program that Triton interprets."""
    return 27 if gpu.interpreting() else 63


def small_chunks(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Makes chunks of about `size` elements."""
    monkeypatch.setitem(torch_ops.CHUNK, "cpu", 4 * size)
    monkeypatch.setattr(torch_ops, "BLOCK", size // 3)
    if gpu.interpreting():
        from tilegrad.kernels.cross_entropy import triton_ops

        monkeypatch.setitem(triton_ops.CHUNK, "cpu", 4 * size)
        monkeypatch.setattr(triton_ops, "TILE", 32)
    monkeypatch.setitem(embedding_mse.BLOCK, "cpu", size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [1, 1000, 1 << 24])
def test_losses_agree_with_autograd(monkeypatch: pytest.MonkeyPatch, loss: str, dtype: torch.dtype, chunk: int) -> None:
    if gpu.interpreting() and chunk != 1000:
        pytest.skip("Triton's kernel has its chunks in products alone")
    small_chunks(monkeypatch, chunk)
    for n, c, v in ((1, 3, 2), (rows(), 16, 50), (9, 16, 200), *(() if gpu.interpreting() else ((113, 24, 63),))):
        inputs, targets = build(n, c, v, dtype)
        got = run(loss, inputs, targets, 1 / 64)
        assert_right(loss, got, inputs, targets)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_targets_gradients_are_zero(loss: str, dtype: torch.dtype) -> None:
    inputs, targets = build(20, 8, 30, dtype)
    out = run(loss, inputs, torch.full_like(targets, -1), 0.0)
    assert not out["loss"].any() and not out["dx"].any() and not out["dw"].any()


@pytest.mark.parametrize("accumulate", [True, False])
def test_without_rows_gradients_add_zero_or_become_zero(loss: str, accumulate: bool) -> None:
    inputs = {"x": torch.zeros(0, 8), "w": randn(30, 8, dtype=torch.float32)}
    dw, inv = torch.ones(30, 8), torch.ones(())
    targets = torch.zeros(0, dtype=torch.int64)
    call(loss, "bwd", inputs, targets, inv, dx=torch.zeros(0, 8), dw=dw, accumulate=accumulate)
    assert torch.equal(dw, torch.full((30, 8), 1.0 if accumulate else 0.0))


@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_of_the_weights_accumulates_and_the_rest_overwrites(loss: str) -> None:
    inputs, targets = build(63, 16, 50, torch.float64)
    once = run(loss, inputs, targets, 0.1)
    again = {name: x.clone() for name, x in once.items()}
    inv = torch.tensor(0.1, dtype=torch.float64)
    call(loss, "bwd", inputs, targets, inv, **again)
    assert torch.allclose(again["dw"], 2 * once["dw"], rtol=1e-12)
    assert torch.equal(again["dx"], once["dx"]) and torch.equal(again["loss"], once["loss"])
    for name in ("dx", "dw"):
        alone = outputs_of(inputs)[name]
        call(loss, "bwd", inputs, targets, inv, **{name: alone})
        assert torch.equal(alone, once[name])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_of_the_weights_that_does_not_accumulate_overwrites(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, loss: str
) -> None:
    small_chunks(monkeypatch, 1000)
    inputs, targets = build(rows(), 16, 50, dtype)
    want, inv = run(loss, inputs, targets, 0.1), torch.tensor(0.1, dtype=acc(dtype))
    for names in (("loss", "dx", "dw"), ("dx", "dw")):
        got = {name: torch.full_like(want[name], torch.nan) for name in names}
        call(loss, "bwd", inputs, targets, inv, accumulate=False, **got)
        assert all(torch.equal(got[name], want[name]) for name in names)


@pytest.mark.parametrize("products", [False, True])
def test_float32_weights_of_bfloat16_losses_give_the_bits_of_bfloat16_ones(
    monkeypatch: pytest.MonkeyPatch, loss: str, products: bool
) -> None:
    if products and gpu.interpreting():
        pytest.skip("oneDNN's products would read the padding that Triton's kernel leaves for CUDA")
    small_chunks(monkeypatch, 1000)
    inputs, targets = build(rows(), 16, 50, torch.bfloat16)
    wide = {"x": inputs["x"], "w": inputs["w"].float()}
    with monkeypatch.context() as patch:  # the interpreter's fixture, which ends before monkeypatch's, replaces it too
        patch.setattr(linear, "_has_bf16_products", lambda: products)
        got, want = run(loss, wide, targets, 1 / 64), run(loss, inputs, targets, 1 / 64)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_chunks_are_few_and_of_equal_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_ops.CHUNK, "cpu", 4 * 50 * 300)
    for n, want in ((256, [256]), (257, [129, 128]), (600, [200, 200, 200]), (1, [1])):
        x, w = torch.empty(n, 4), torch.empty(50, 4)
        assert [i.stop - i.start for i in torch_ops.chunks_of(x, w)] == want
    for n, most, multiple, even in ((10, 4, 1, [4, 4, 2]), (10, 8, 4, [8, 2]), (9, 3, 2, [3, 3, 3]), (7, 7, 2, [7])):
        assert [i.stop - i.start for i in chunks.chunks(n, most, multiple)] == even, (n, most, multiple)
    assert not list(chunks.chunks(0, 4))


def test_the_most_rows_of_a_chunk_follow_from_its_bytes() -> None:
    """The arguments: rows, columns, bytes of a number, total bytes, and a multiple for larger results."""
    for given, want in {
        (1000, 10, 4, 4000, 32): 96,
        (1000, 10, 4, 1280, 32): 32,
        (1000, 10, 4, 1240, 32): 31,
        (20, 10, 4, 4000, 32): 20,
        (1000, 10, 4, 10, 32): 1,
        (1000, 0, 4, 400, 256): 100,
    }.items():
        assert chunks.most_rows(*given) == want, given


def test_triton_refuses_float16_losses() -> None:
    """It also refuses a CPU, for another reason."""
    x = torch.empty(2, 4)
    reasons = [CROSS_ENTROPY.explain(Problem(y, y)).reasons["triton"] for y in (x.half(), x)]
    assert "underflows in float16" in reasons[0] and "float16" not in reasons[1]


@pytest.mark.parametrize("loss", LOSSES)
def test_micro_batches_add_up_to_one_batch(loss: str) -> None:
    inputs, targets = build(60, 16, 50, torch.float64)
    whole = run(loss, inputs, targets, 0.05)
    parts = [
        run(loss, {"x": inputs["x"][i], "w": inputs["w"]}, targets[i], 0.05) for i in (slice(0, 13), slice(13, 60))
    ]
    assert torch.allclose(parts[0]["loss"] + parts[1]["loss"], whole["loss"], rtol=1e-13)
    assert torch.allclose(parts[0]["dw"] + parts[1]["dw"], whole["dw"], rtol=1e-12, atol=1e-15)
    assert torch.allclose(torch.cat([part["dx"] for part in parts]), whole["dx"], rtol=1e-12, atol=1e-15)


@pytest.mark.usefixtures("kernels")
def test_very_large_logits_and_an_impossible_target_give_finite_gradients() -> None:
    inputs, targets = build(63, 16, 50, torch.float32)
    inputs["x"] *= 200.0
    got = run("cross_entropy", inputs, targets, 1 / 64)
    assert got["loss"] > 100 and got["dx"].isfinite().all()
    assert_right("cross_entropy", got, inputs, targets)


def test_the_whole_logits_matrix_never_exists() -> None:
    x, w = torch.empty(4096, 64, device="meta"), torch.empty(50304, 64, device="meta")
    handles = [
        type("Handle", (), {"shape": t.shape, "dtype": t.dtype, "device": torch.device("cpu")})() for t in (x, w)
    ]
    shapes = cross_entropy_workspace(*handles, backward=True)
    largest = max(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes.values())
    assert largest <= 1 << 26 < 4096 * 50304 * 4


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_scratch_of_a_large_batch_serves_a_smaller_one(
    monkeypatch: pytest.MonkeyPatch, loss: str, dtype: torch.dtype
) -> None:
    small_chunks(monkeypatch, 50 * 37)
    inputs, _ = build(113, 16, 50, dtype)
    scratch = poisoned(
        cross_entropy_workspace(inputs["x"], inputs["w"], backward=True)
        if loss == "cross_entropy"
        else embedding_mse_workspace(inputs["x"], inputs["w"])
    )
    inv = torch.tensor(1 / 64, dtype=acc(dtype))
    for n in (1, 30, 38, 74, 113):
        inputs, targets = build(n, 16, 50, dtype)
        want, got = run(loss, inputs, targets, 1 / 64), outputs_of(inputs)
        if loss == "cross_entropy":
            cross_entropy_bwd(inputs["x"], inputs["w"], targets, inv, **got, scratch=scratch)
        else:
            got["dwte"] = got.pop("dw")
            want["dwte"] = want.pop("dw")
            embedding_mse_bwd(inputs["x"], inputs["w"], targets, inv, **got, scratch=scratch)
        assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_losses_allocate_no_memory(monkeypatch: pytest.MonkeyPatch, loss: str, dtype: torch.dtype) -> None:
    small_chunks(monkeypatch, 100 * 120)
    inputs, targets = build(300, 64, 120, dtype)
    x, w, out, inv = inputs["x"], inputs["w"], outputs_of(inputs), torch.tensor(0.1, dtype=acc(dtype))
    if loss == "cross_entropy":
        scratch = poisoned(cross_entropy_workspace(x, w, backward=True))
        step = lambda: cross_entropy_bwd(x, w, targets, inv, **out, scratch=scratch)  # noqa: E731
    else:
        scratch = poisoned(embedding_mse_workspace(x, w))
        step = lambda: embedding_mse_bwd(  # noqa: E731
            x, w, targets, inv, loss=out["loss"], dx=out["dx"], dwte=out["dw"], scratch=scratch
        )
    products = ((100, 64, 120),) if loss == "cross_entropy" else ()
    assert allocated_bytes(step) <= allowed_bytes(dtype, *products)


@pytest.mark.parametrize("dtype", DTYPES)
def test_canary_one_wrong_target_is_seen(loss: str, dtype: torch.dtype) -> None:
    inputs, targets = build(63, 16, 50, dtype)
    wrong = targets.clone()
    wrong[62] = 0
    got = run(loss, inputs, wrong, 1 / 64)
    for name in ("loss", "dx", "dw"):
        with pytest.raises(AssertionError, match=f"{name}: "):
            assert_right(loss, {name: got[name]}, inputs, targets)


def test_canary_a_factor_in_bfloat16_is_seen(loss: str) -> None:
    inputs, targets = build(113, 32, 63, torch.bfloat16)
    got = run(loss, inputs, targets, 1 / 64)
    assert_factors_are_seen(got, lambda tensors: assert_right(loss, tensors, inputs, targets), 1.01, 1.005)


@pytest.mark.parametrize("invariant", [False, True])
def test_capped_logits_follow_their_equation(invariant: bool) -> None:
    """They are computed in place, also by the native tanh of an invariant problem."""
    if invariant and isinstance(library(), str):
        pytest.skip("an invariant tanh is the native library's")
    for dtype in (torch.float32,) if invariant else (torch.float32, torch.float64):
        x = 3 * randn(63, 113, dtype=dtype)
        y, c = x.clone(), 1.5
        softcap_fwd(y, c, y=y, invariant=invariant)
        allowed = bounds.bounds(dtype, {"y": bounds.tanh(bounds.of(x) * (1 / c)) * c})
        assert_close({"y": y}, {"y": c * torch.tanh(x.double() / c)}, allowed)
        if invariant:
            native = x / c
            activation_fwd(native, "tanh", a=native, invariant=True, kernel="native")
            assert torch.equal(y, native * c)
        with pytest.raises(AssertionError, match="y: "):
            assert_close({"y": y * 1.001}, {"y": c * torch.tanh(x.double() / c)}, allowed)
    with pytest.raises(ValueError, match=r"softcap: got 0\.0; accepted: a number > 0"):
        softcap_fwd(x, 0.0, y=x)


def test_errors_of_losses_say_what_is_accepted() -> None:
    inputs, targets = build(4, 6, 5, torch.float64)
    inv, x = torch.tensor(1.0, dtype=torch.float64), inputs["x"]
    out = outputs_of(inputs)
    for loss in LOSSES:
        for targets_given, inv_given, dx, match in (
            (torch.full((4,), -100), inv, x.clone(), "targets: got -100; accepted: 0 … 4, or −1 to ignore a row"),
            (torch.full((4,), -2), inv, x.clone(), "targets: got -2; accepted: 0 … 4, or −1 to ignore a row"),
            (torch.full((4,), 5), inv, x.clone(), "targets: got 5; accepted: 0 … 4"),
            (targets.int(), inv, x.clone(), "targets: got torch.int32"),
            (targets, inv.float(), x.clone(), "inv_total: got .*float32.*accepted: .*float64"),
            (targets, inv, randn(4, 5), r"dx: got .*\(4, 5\).*accepted: .*\(4, 6\)"),
        ):
            with pytest.raises(ValueError, match=match):
                call(loss, "bwd", inputs, targets_given, inv_given, dx=dx, dw=out["dw"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_dx_may_overwrite_x(monkeypatch: pytest.MonkeyPatch, loss: str, dtype: torch.dtype) -> None:
    monkeypatch.setitem(torch_ops.CHUNK, "cpu", 20 * 13 * dtype.itemsize)  # more than one chunk
    inputs, targets = build(63, 16, 13, dtype)
    inv_total, want = torch.tensor(1 / 64, dtype=acc(dtype)), outputs_of(inputs)
    call(loss, "bwd", inputs, targets, inv_total, **want)
    x = inputs["x"].clone()
    got = outputs_of(inputs) | {"dx": x}
    call(loss, "bwd", inputs | {"x": x}, targets, inv_total, **got)
    assert all(torch.equal(got[name], want[name]) for name in want)
