"""Gradients are checked by central differences, on losses with a known slope."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tilegrad import ModelConfig
from tilegrad.engine.gradcheck import (
    GradientError,
    check_attention,
    check_gradients,
    check_model,
    gradient_table,
    small,
)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def error(relative: float = 0.0, direction: float = 0.0) -> GradientError:
    return GradientError("w", (2, 3), 6, relative, direction, (1, 2))


def test_an_error_of_up_to_a_hundred_thousandth_passes_in_either_measure() -> None:
    assert error(1e-5, 1e-5).passed and not error(1.01e-5).passed and not error(0.0, 1.01e-5).passed
    assert not error(math.nan).passed and not error(0.0, math.nan).passed
    lines = gradient_table([error(), error(1.0)]).splitlines()
    assert lines[-2].split() == ["w", "2×3", "6", "0.0e+00", "0.0e+00", "[1,", "2]", "pass"]
    assert lines[-1].endswith("FAIL")


def test_up_to_64_entries_of_a_tensor_and_one_direction_move_by_a_millionth_and_back() -> None:
    tensors, moved = {"few": randn(2, 3), "many": randn(100)}, []
    before = {name: x.clone() for name, x in tensors.items()}

    def loss() -> float:
        moved.append({name: x - before[name] for name, x in tensors.items()})
        return float(sum((x**2).sum() for x in tensors.values()))

    results = check_gradients(loss, tensors, {name: 2 * x for name, x in tensors.items()})
    assert [(r.tensor, r.shape, r.checked) for r in results] == [("few", (2, 3), 6), ("many", (100,), 64)]
    assert all(r.passed and len(r.worst) == len(r.shape) for r in results)
    assert all(torch.equal(x, before[name]) for name, x in tensors.items())
    assert len(moved) == 2 * (6 + 1) + 2 * (64 + 1)
    for up, down in zip(moved[::2], moved[1::2], strict=True):
        assert all(torch.allclose(up[name], -down[name], atol=1e-15) for name in tensors)
    single = [m["few"].abs() for m in moved[:12]]
    assert all(x.count_nonzero() == 1 and float(x.max()) == pytest.approx(1e-6, rel=1e-6) for x in single)
    assert len({tuple(x.nonzero()[0].tolist()) for x in single}) == 6
    along = moved[12]["few"] / 1e-6
    assert along.count_nonzero() == 6 and 0.2 < float(along.std()) < 3


@pytest.mark.parametrize("factor", [1.5, 0.5])
def test_an_error_is_relative_to_the_larger_of_both(factor: float) -> None:
    w = torch.tensor([3.0, -1.0, 2.0], dtype=torch.float64)
    wrong = 2 * w
    wrong[0] *= factor
    (result,) = check_gradients(lambda: float((w**2).sum()), {"w": w}, {"w": wrong})
    assert result.worst == (0,)
    assert result.relative_error == pytest.approx(3.0 / 6.0 if factor < 1 else 3.0 / 9.0, rel=1e-6)
    assert result.direction_error > 0.01


def test_a_gradient_that_should_vanish_is_measured_against_a_millionth_of_the_largest() -> None:
    w, idle = torch.tensor([3.0], dtype=torch.float64), torch.tensor([5.0], dtype=torch.float64)
    gradients = {"w": 2 * w, "idle": torch.full_like(idle, 3e-11)}
    results = {r.tensor: r for r in check_gradients(lambda: float((w**2).sum()), {"w": w, "idle": idle}, gradients)}
    assert results["w"].passed and results["idle"].passed
    assert results["idle"].relative_error == pytest.approx(3e-11 / 6e-6, rel=1e-6)
    assert 0 < results["idle"].direction_error < 3e-5


def test_an_error_along_a_direction_is_relative_to_the_larger_slope() -> None:
    w = randn(7)
    (result,) = check_gradients(lambda: float((w**2).sum()), {"w": w}, {"w": 4 * w})
    assert result.direction_error == pytest.approx(0.5, rel=1e-5)


def test_a_slope_that_is_not_a_number_fails_and_is_named() -> None:
    w = torch.tensor([1.0, 4.0, 2.0], dtype=torch.float64)
    gradient = torch.tensor([2.0, math.nan, 4.0], dtype=torch.float64)
    (result,) = check_gradients(lambda: float((w**2).sum()), {"w": w}, {"w": gradient})
    assert not result.passed and result.worst == (1,)


def test_only_float64_parameters_are_accepted() -> None:
    w = torch.ones(2)
    with pytest.raises(ValueError, match=r"tensors\['w'\]: got torch.float32; accepted: float64"):
        check_gradients(lambda: 0.0, {"w": w}, {"w": w})


def test_attention_is_checked_with_every_feature_that_has_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilegrad.engine.gradcheck.SAMPLES", 2)
    results = check_attention("tiled")
    assert [(r.tensor, r.shape) for r in results] == [
        ("q", (1, 2, 270, 4)), ("k", (1, 1, 300, 4)), ("v", (1, 1, 300, 3)), ("bias", (2, 1, 300)), ("sinks", (2,)),
    ]  # fmt: skip
    assert all(r.passed for r in results)


def test_a_small_model_has_the_kinds_of_layers_of_the_large_one() -> None:
    config = ModelConfig(
        vocab_size=1000, block_size=64, n_layer=6, n_head=4, n_kv_head=2, n_embd=64, head_size=32, window=16,
        window_layers=(0, 1, 2, 5), dropout=0.1,
    )  # fmt: skip
    got = small(config)
    assert (got.vocab_size, got.block_size, got.n_layer, got.n_embd, got.ffn_dim) == (29, 12, 2, 16, 24)
    assert (got.head_size, got.window, got.window_layers, got.dropout) == (6, 5, (0, 1), 0.0)
    assert (got.n_head, got.n_kv_head) == (4, 2)
    narrow = small(ModelConfig(1000, 64, n_layer=6, n_head=2, n_embd=8, window=3))
    assert (narrow.window, narrow.head_size, narrow.window_layers) == (3, None, None)


def test_autograd_is_compared_entry_by_entry() -> None:
    results = check_model(ModelConfig(29, 12, n_layer=2, n_head=2, n_embd=8), against="autograd")
    assert all(r.passed and r.checked == math.prod(r.shape) and len(r.worst) == len(r.shape) for r in results)
    assert {"blocks.1.ffn.up.weight"} <= {r.tensor for r in results}
