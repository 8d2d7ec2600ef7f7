"""AdamW and the global norm against those of torch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from support import bounds
from support.ops import allocated_bytes, poisoned, randn
from torch import Tensor

from tilegrad.kernels import gpu
from tilegrad.kernels.adamw import adamw_step, adamw_workspace, torch_ops
from tilegrad.kernels.closeness import assert_close, complaints
from tilegrad.kernels.global_norm import global_norm, global_norm_workspace
from tilegrad.kernels.global_norm import torch_ops as norm_torch_ops

DTYPES = (torch.float64, torch.float32)
DECAYED, PLAIN = (5, 37), (63,)
P, SPLIT = 5 * 37 + 63, 5 * 37


class Arenas:
    """Flat params, grads, m and v, and a method that takes a step."""

    def __init__(self, dtype: torch.dtype, max_norm: float = 1.0) -> None:
        self.params, self.m, self.v = randn(P, dtype=dtype), torch.zeros(P, dtype=dtype), torch.zeros(P, dtype=dtype)
        self.norm, self.step, self.max_norm = torch.zeros((), dtype=dtype), torch.zeros(()), max_norm
        self.scratch = poisoned(adamw_workspace(self.params) | global_norm_workspace(self.params))

    def update(self, grads: Tensor, learning_rate: float | Tensor) -> None:
        global_norm(grads, norm=self.norm, scratch=self.scratch)
        adamw_step(
            self.norm, learning_rate, SPLIT, 0.1, self.max_norm,
            params=self.params, grads=grads, m=self.m, v=self.v, step=self.step, scratch=self.scratch,
        )  # fmt: skip

    def state(self) -> list[Tensor]:
        return [x.clone() for x in (self.params, self.m, self.v, self.step)]


def torch_adamw(params: Tensor, gradients: list[Tensor], rates: list[float], max_norm: float) -> Tensor:
    leaves = [params[:SPLIT].clone().requires_grad_(), params[SPLIT:].clone().requires_grad_()]
    groups = [{"params": leaves[:1], "weight_decay": 0.1}, {"params": leaves[1:], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, foreach=False, fused=False)
    for g, rate in zip(gradients, rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        leaves[0].grad, leaves[1].grad = g[:SPLIT].clone(), g[SPLIT:].clone()
        torch.nn.utils.clip_grad_norm_(leaves, max_norm, foreach=False)
        optimizer.step()
    return torch.cat([leaf.detach() for leaf in leaves])


def compare(dtype: torch.dtype, max_norm: float, *, learning_rate_tensor: bool = False) -> list[str]:
    """The errors that the closeness rule finds after 12 steps, against torch in float64."""
    arenas, rates = Arenas(dtype, max_norm), [1e-2 * (0.8**i) for i in range(12)]
    gradients = [randn(P, dtype=dtype, seed=i + 1) * (0.01 if i % 3 else 2.0) for i in range(12)]
    want = torch_adamw(arenas.params.double(), [g.double() for g in gradients], rates, max_norm)
    nothing = torch.zeros(P)
    of = bounds.AdamW(bounds.of(arenas.params), bounds.of(nothing), bounds.of(nothing))
    for i, (g, rate) in enumerate(zip(gradients, rates, strict=True)):
        of.step(g, i + 1, rate, SPLIT, 0.1, max_norm)
        arenas.update(g.clone(), torch.tensor(rate) if learning_rate_tensor else rate)
    assert arenas.step == 12
    return complaints({"params": arenas.params}, {"params": want}, bounds.bounds(dtype, {"params": of.params}))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("slow_factor", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("max_norm", [1.0, 1e3, float("inf")])
def test_steps_equal_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, max_norm: float, slow_factor: bool
) -> None:
    if gpu.interpreting() and slow_factor:
        pytest.skip("is torch's kernel's")
    monkeypatch.setattr(torch_ops, "_SLOW_FACTOR", slow_factor)
    assert compare(dtype, max_norm) == []


@pytest.mark.usefixtures("kernels")
def test_learning_rate_may_be_a_tensor() -> None:
    assert compare(torch.float32, 1.0, learning_rate_tensor=True) == []


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(dtype: torch.dtype, bad: float) -> None:
    arenas = Arenas(dtype)
    arenas.update(randn(P, dtype=dtype, seed=1), 1e-2)
    before, broken = arenas.state(), randn(P, dtype=dtype, seed=2)
    broken[P - 1] = bad
    arenas.update(broken, 1e-2)
    assert not arenas.norm.isfinite()
    assert all(torch.equal(x, y) for x, y in zip(before, arenas.state(), strict=True))
    arenas.update(randn(P, dtype=dtype, seed=3), 1e-2)
    assert arenas.step == 2 and not torch.equal(before[0], arenas.params)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_compute_copy_is_rounded_in_the_same_pass(dtype: torch.dtype) -> None:
    arenas, copy = Arenas(dtype), torch.full((P,), torch.nan, dtype=torch.bfloat16)
    for bad in (False, True):
        g = randn(P, dtype=dtype, seed=int(bad))
        g[5] = torch.nan if bad else g[5]
        global_norm(g, norm=arenas.norm, scratch=arenas.scratch)
        adamw_step(
            arenas.norm, 1e-2, SPLIT, params=arenas.params, grads=g, m=arenas.m, v=arenas.v, step=arenas.step,
            rounded=copy, scratch=arenas.scratch,
        )  # fmt: skip
        assert torch.equal(copy, arenas.params.to(torch.bfloat16)) and copy.isfinite().all()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("cut", [[100], [3, SPLIT], [P]])
def test_a_step_of_the_pieces_of_a_range_equals_one_step(monkeypatch: pytest.MonkeyPatch, cut: list[int]) -> None:
    """It checks with and without a compute copy. The last cut leaves an empty piece."""
    monkeypatch.setattr(norm_torch_ops, "BLOCK", 16)
    one, many, copy = Arenas(torch.float32), Arenas(torch.float32), torch.zeros(P, dtype=torch.bfloat16)
    ends = [0, *cut, P]
    pieces = [slice(a, b) for a, b in pairwise(ends)]
    decayed = [max(0, min(SPLIT, i.stop) - i.start) for i in pieces]
    shapes = global_norm_workspace(*(many.params[i] for i in pieces))
    many.scratch |= poisoned(shapes)
    for step in range(3):
        g = randn(P, dtype=torch.float32, seed=step + 1)
        one.update(g.clone(), 1e-2)
        held: dict[str, Any] = {name: [getattr(many, name)[i] for i in pieces] for name in ("params", "m", "v")}
        held["grads"] = [g[i] for i in pieces]
        held["rounded"] = [copy[i] for i in pieces] if step == 2 else None
        global_norm(held["grads"], norm=many.norm, scratch=many.scratch)
        adamw_step(many.norm, 1e-2, decayed, 0.1, 1.0, step=many.step, scratch=many.scratch, **held)
    assert all(torch.allclose(x, y, rtol=1e-6, atol=1e-8) for x, y in zip(one.state(), many.state(), strict=True))
    assert torch.equal(copy, many.params.bfloat16())


@pytest.mark.parametrize("lengths", [(70, 3, 130), (64, 64), (1, 200, 1, 40)])
def test_the_global_norm_of_ranges_is_right(monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...]) -> None:
    monkeypatch.setattr(norm_torch_ops, "BLOCK", 64)
    ranges, norm = [randn(n, seed=i) for i, n in enumerate(lengths)], torch.zeros((), dtype=torch.float64)
    global_norm(ranges, norm=norm, scratch=poisoned(global_norm_workspace(*ranges)), kernel="torch")
    assert float(norm) == pytest.approx(float(torch.cat(ranges).norm()), rel=1e-12)


@pytest.mark.parametrize("decayed", [0, P])
def test_none_or_all_parameters_may_decay(decayed: int) -> None:
    arenas = Arenas(torch.float64)
    before, g = arenas.params.clone(), torch.zeros(P, dtype=torch.float64)
    adamw_step(
        arenas.norm, 1e-2, decayed, 0.1, params=arenas.params, grads=g, m=arenas.m, v=arenas.v, step=arenas.step,
        scratch=arenas.scratch,
    )  # fmt: skip
    assert torch.allclose(arenas.params, before * (0.999 if decayed else 1.0), rtol=1e-12)


@pytest.mark.usefixtures("kernels")
def test_a_resumed_state_gives_the_same_bits() -> None:
    a, b = Arenas(torch.float32), Arenas(torch.float32)
    for i in range(4):
        a.update(randn(P, dtype=torch.float32, seed=i), 1e-2)
        if i == 1:
            for to, x in zip((b.params, b.m, b.v, b.step), a.state(), strict=True):
                to.copy_(x)
        elif i > 1:
            b.update(randn(P, dtype=torch.float32, seed=i), 1e-2)
    assert all(torch.equal(x, y) for x, y in zip(a.state(), b.state(), strict=True))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 63, 64, 128, 1000])
def test_the_global_norm_equals_that_of_torch(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, n: int) -> None:
    monkeypatch.setattr(norm_torch_ops, "BLOCK", 64)
    if gpu.interpreting():
        from tilegrad.kernels.global_norm import triton_ops

        monkeypatch.setattr(triton_ops, "PART", 64)
        monkeypatch.setattr(triton_ops, "TILE", 16)
        monkeypatch.setattr(triton_ops, "SUM", 4)
    g, norm = randn(n, dtype=dtype), torch.zeros((), dtype=dtype)
    global_norm(g, norm=norm, scratch=poisoned(global_norm_workspace(g)))
    of = bounds.sqrt((bounds.of(g) * bounds.of(g)).sum(0))
    assert_close({"norm": norm}, {"norm": g.double().square().sum().sqrt()}, bounds.bounds(dtype, {"norm": of}))


def test_adamw_allocates_no_memory() -> None:
    for dtype in DTYPES:
        n = 3 * norm_torch_ops.BLOCK + 5
        x = randn(n, dtype=dtype)
        m, v, g, norm, step = torch.zeros_like(x), torch.zeros_like(x), x.clone(), x.new_zeros(()), torch.zeros(())
        scratch = poisoned(adamw_workspace(x) | global_norm_workspace(x))
        assert allocated_bytes(lambda: global_norm(g, norm=norm, scratch=scratch)) <= 1024  # noqa: B023
        assert allocated_bytes(
            lambda: adamw_step(norm, 1e-3, n // 2, params=x, grads=g, m=m, v=v, step=step, scratch=scratch)  # noqa: B023
        ) <= 1024  # fmt: skip


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("broken", ["step", "decayed", "rate"])
def test_canary_a_wrong_step_count_decay_or_rate_is_seen(
    monkeypatch: pytest.MonkeyPatch, broken: str, dtype: torch.dtype
) -> None:
    right = adamw_step

    def wrong(norm, learning_rate, decayed, *scalars, step, **outputs):
        if broken == "step":
            right(norm, learning_rate, decayed, *scalars, step=step + 1, **outputs)
            step.add_(1.0)
        elif broken == "decayed":
            right(norm, learning_rate, decayed - 1, *scalars, step=step, **outputs)
        else:
            right(norm, 1.001 * learning_rate, decayed, *scalars, step=step, **outputs)

    monkeypatch.setitem(globals(), "adamw_step", wrong)
    assert compare(dtype, 1.0) != []


def test_errors_of_adamw_say_what_is_accepted() -> None:
    x, norm, step = randn(6), randn(), torch.zeros(())
    arenas: dict[str, Any] = {"params": x, "grads": x, "m": x, "v": x, "step": step}
    for fn, match in (
        (lambda: adamw_step(norm, 1e-3, 7, **arenas), "decayed: got 7; accepted: 0 … 6"),
        (lambda: adamw_step(norm, 1e-3, -1, **arenas), "decayed: got -1; accepted: 0 … 6"),
        (lambda: adamw_step(norm, 1e-3, 6, 0.1, 0.0, **arenas), "max_norm: got 0.0; accepted: a number > 0"),
        (lambda: adamw_step(norm, 1e-3, 6, **arenas | {"m": randn(5)}), r"m: got .*\(5,\).*accepted: .*\(6,\)"),
        (
            lambda: adamw_step(norm, 1e-3, 6, **arenas | {"step": step.double()}),
            "step: got .*float64.*accepted: .*float32",
        ),
        (lambda: adamw_step(norm, 1e-3, 6, **arenas), "scratch: adamw got no 'torch.grad_scale'"),
        (lambda: global_norm(x, norm=norm.float()), "norm: got .*float32"),
        (lambda: global_norm(x.to(torch.float16), norm=norm), "grads: got .*float16.*accepted: .*float32"),
    ):
        with pytest.raises(ValueError, match=match):
            fn()


@pytest.mark.parametrize(
    ("params", "copy", "message"),
    [
        (torch.float32, torch.float32, "rounded: got .*float32.*; accepted: .*bfloat16"),
        (torch.bfloat16, torch.bfloat16, "rounded: got a copy of bfloat16 params; accepted: None"),
    ],
)
def test_lean_states_refuse_a_compute_copy_that_their_kernel_cannot_write(
    params: torch.dtype, copy: torch.dtype, message: str
) -> None:
    states: dict[str, Any] = {"params": torch.zeros(8, dtype=params), "grads": torch.zeros(8)}
    states |= {name: torch.zeros(8, dtype=torch.bfloat16) for name in "mv"}
    with pytest.raises(ValueError, match=message):
        adamw_step(
            torch.ones(()), 1e-3, 0, seed=torch.tensor(0), **states,
            step=torch.zeros(()), rounded=torch.zeros(8, dtype=copy),
        )  # fmt: skip
