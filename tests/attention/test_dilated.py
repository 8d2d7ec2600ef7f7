"""Dilated attention against whole masks in float64, its views against a list of positions, and its errors."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tilegrad
from tilegrad.functional.dilated import pattern, reference
from tilegrad.functional.dilated import run as execution
from tilegrad.functional.dilated.functional import dilated_attention
from tilegrad.kernels.attention import Mask, table
from tilegrad.kernels.attention.problem import Problem
from tilegrad.kernels.closeness import complaints

NAMES = ("o", "dq", "dk", "dv")
LAYOUTS = ("bthd", "bhtd", "fused", "mixed")


@dataclass(frozen=True)
class Case:
    b: int = 2
    h: int = 4
    t: int = 40
    d: int = 8
    dv: int = 8
    segments: tuple[int, ...] = (8, 40)
    rates: tuple[int, ...] = (1, 4)
    mode: Any = "longnet"
    causal: bool = False
    dtype: torch.dtype = torch.float64
    layout: str = "bthd"
    device: str = "cpu"
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)


def draw(seed: int, *, longest: int = 48, dtypes: tuple[torch.dtype, ...] = (torch.float64,), **more: Any) -> Case:
    """Draws a case. Segments and rates need not divide T; groups and rates need not divide the heads."""
    r = random.Random(seed)
    n, mode = r.randint(1, 4), r.choice(pattern.MODES)
    return Case(
        b=r.randint(1, 3), h=r.randint(n if mode == "head_groups" else 1, 8), t=r.randint(1, longest),
        d=r.choice((4, 8, 16)), dv=r.choice((4, 8, 16)), segments=tuple(r.randint(1, longest + 8) for _ in range(n)),
        rates=tuple(r.randint(1, 6) for _ in range(n)), mode=mode, causal=r.random() < 0.5, dtype=r.choice(dtypes),
        layout=r.choice(LAYOUTS), seed=seed, **more,
    )  # fmt: skip


def tensors(case: Case) -> list[Tensor]:
    """q, k, v and dy (B, H, T, D)."""
    g = torch.Generator().manual_seed(case.seed)
    forms = [(case.d, case.layout), (case.d, case.layout), (case.dv, case.layout), (case.dv, "bhtd")]
    made = []
    for i, (d, layout) in enumerate(forms):
        x = torch.randn(case.b, case.t, case.h, d, generator=g, dtype=torch.float64).to(case.device, case.dtype)
        if layout == "fused":
            x = torch.cat([x, x], -1)[..., :d]
        x = x.transpose(1, 2)
        made.append(x.contiguous() if layout == "bhtd" or layout == "mixed" and i % 2 else x)
    return made


def run(case: Case) -> tuple[dict[str, Tensor], list[Tensor]]:
    *qkv, dy = tensors(case)
    q, k, v = leaves = [x.requires_grad_() for x in qkv]
    y = dilated_attention(q, k, v, case.segments, case.rates, mode=case.mode, causal=case.causal, **case.options)
    grads = torch.autograd.grad(y, leaves, dy)
    return dict(zip(NAMES, (y.detach(), *grads), strict=True)), [*(x.detach() for x in qkv), dy]


def oracle(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """The pairs that attend, and the exact results."""
    attended = reference.pairs(case.h, case.t, case.segments, case.rates, mode=case.mode, causal=case.causal)
    q, k, v, dy = tensors(case)
    return attended, reference.gradients(q, k, v, dy, attended, mode=case.mode)


def found(case: Case, got: dict[str, Tensor], given: list[Tensor]) -> list[str]:
    """The errors that the closeness rule finds in `got`."""
    attended, exact = oracle(case)
    order = sorted(range(len(case.rates)), key=lambda i: case.rates[i])
    with torch.no_grad():
        q, k, v, dy = given
        bounds = reference.bounds(q, k, v, dy, attended[order], exact, mode=case.mode)
    return complaints(got, exact, bounds)


def assert_right(case: Case) -> None:
    assert not (wrong := found(case, *run(case))), f"{case}: {'; '.join(wrong)}"


SHORT = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("seed", range(10))
def test_random_cases_equal_whole_masks(seed: int) -> None:
    assert_right(draw(seed))
    assert_right(draw(seed, longest=32, dtypes=SHORT))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1500, 50))
def test_500_random_cases_equal_whole_masks(first: int) -> None:
    for seed in range(first, first + 50):
        assert_right(draw(seed))
        assert_right(draw(seed, longest=100, dtypes=SHORT))


@pytest.mark.parametrize("kernel", ["tiled", "native"])
@pytest.mark.parametrize("mode", pattern.MODES)
def test_a_kernel_can_be_chosen_by_name(kernel: str, mode: str) -> None:
    assert_right(Case(mode=mode, t=45, causal=True, dtype=torch.float32, options={"kernel": kernel}))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_random_cases_on_a_gpu_equal_whole_masks(seed: int) -> None:
    short = (torch.bfloat16, torch.float16, torch.float32)
    assert_right(draw(seed, longest=600, dtypes=short, device="cuda"))


@pytest.mark.parametrize("mode", pattern.MODES)
def test_canary_a_factor_is_seen(mode: str) -> None:
    case = Case(mode=mode, dtype=torch.bfloat16, t=60)
    got, given = run(case)
    assert not found(case, got, given)
    wrong = "; ".join(found(case, {name: 1.01 * x for name, x in got.items()}, given))
    assert all(f"{name}: " in wrong for name in NAMES)


@pytest.mark.parametrize("mode", pattern.MODES)
def test_the_parts_that_the_bounds_round_sum_to_the_results(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, parts = Case(mode=mode, dtype=torch.float32), []

    def seen(of: list[Tensor], _dtype: torch.dtype) -> Tensor:
        parts.append(sum(of))
        return torch.zeros_like(of[0])

    monkeypatch.setattr(reference, "_roundings", seen)
    (q, k, v, dy), (attended, exact) = tensors(case), oracle(case)
    reference.bounds(q, k, v, dy, attended, exact, mode=mode)
    groups = 2 if mode == "head_groups" else 1
    for name, part in zip(NAMES, parts, strict=True):
        torch.testing.assert_close(part, (groups if name == "o" else 1) * exact[name])


@pytest.mark.parametrize("groups", [1, 2, 3, 4])
def test_a_division_by_a_power_of_two_rounds_nothing(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(mode="head_groups", segments=(40,) * groups, rates=(1,) * groups, dtype=torch.float32)
    monkeypatch.setattr(reference, "rounding", lambda x, _dtype: torch.ones_like(x))
    (q, k, v, dy), (attended, exact) = tensors(case), oracle(case)
    bounds = reference.bounds(q, k, v, dy, attended, exact, mode=case.mode)
    assert all((bounds[name].sigma.max() > 0.01) == (groups == 3) for name in NAMES)


def test_bounds_for_the_rounding_of_do_equal_the_effect_of_each_number() -> None:
    g, scale = torch.Generator().manual_seed(0), 0.7
    q, k = (torch.randn(1, 2, 5, 3, generator=g, dtype=torch.float64) for _ in range(2))
    v, do, var = (torch.randn(1, 2, 5, 4, generator=g, dtype=torch.float64) for _ in range(3))
    p, var = torch.softmax(scale * q @ k.mT, -1), var.square()

    def results(do: Tensor) -> dict[str, Tensor]:
        ds = p * (do @ v.mT - (do * (p @ v)).sum(-1, keepdim=True))
        return {"dq": scale * ds @ k, "dk": scale * ds.mT @ q, "dv": p.mT @ do}

    exact = {"o": p @ v, **results(do)}
    units = torch.eye(do.numel(), dtype=torch.float64).reshape(-1, *do.shape)
    moved = [results(unit) for unit in units]
    got = reference._roundings_of_do(var, p, q, k, v, exact, scale)
    for name in ("dq", "dk", "dv"):
        each = list(zip(var.flatten(), (one[name] for one in moved), strict=True))
        torch.testing.assert_close(got[name][0], torch.stack([one * x**2 for one, x in each]).sum(0))
        torch.testing.assert_close(
            got[name][1], torch.stack([one * (x * exact[name]).sum() ** 2 for one, x in each]).sum()
        )


@pytest.fixture
def fresh() -> Iterator[None]:
    """Clears the cached plans before and after the test."""
    for forget in (pattern.branches.cache_clear, execution._plans.clear):
        forget()
    yield
    for forget in (pattern.branches.cache_clear, execution._plans.clear):
        forget()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(("mode", "broken"), [("head_groups", "_one_offset"), ("longnet", "_by_head")])
def test_canary_a_wrong_offset_is_seen(mode: str, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right: Callable[..., Any] = getattr(pattern, broken)

    def unshifted(*arguments: Any) -> Iterator[Any]:
        for (h, _), axes, rows in right(*arguments):
            yield (h, 0), [axis._replace(step=(*axis.step[:2], 0)) for axis in axes], rows

    case = Case(mode=mode, rates=(1, 4))
    assert not found(case, *run(case))
    monkeypatch.setattr(pattern, broken, unshifted)
    pattern.branches.cache_clear()
    execution._plans.clear()
    assert found(case, *run(case))


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_many_small_calls_compute_the_same(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pattern, "ROWS_PER_CALL", rows)
    for seed in range(3):
        assert_right(draw(seed))


def positions(case: Case) -> list[list[int]]:
    """For each branch, the indices of all (b, h, t) that its views touch, in memory order."""
    x = torch.arange(case.b * case.h * case.t).view(case.b, case.h, case.t, 1)
    x = x if case.layout == "bhtd" else x.transpose(1, 2).contiguous().transpose(1, 2)
    found = pattern.branches((case.b, case.h, case.t), (x.stride()[:3],), case.segments, case.rates, case.mode)
    return [sorted(n for call in branch.calls for n in call.of(x).flatten().tolist()) for branch in found]


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
@pytest.mark.parametrize("seed", range(20))
def test_views_touch_each_covered_position_once(seed: int, layout: str) -> None:
    case = draw(seed, longest=30)
    case = Case(**{**vars(case), "layout": layout})
    attended = reference.pairs(case.h, case.t, case.segments, case.rates, mode=case.mode, causal=False)
    if case.mode == "longnet":
        attended = attended[sorted(range(len(case.rates)), key=lambda i: case.rates[i])]
    for numbers, pairs in zip(positions(case), attended, strict=True):
        covered = pairs.any(-1)[None].expand(case.b, -1, -1)
        assert numbers == covered.flatten().nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("b", "layout", "mode", "calls"),
    [
        (3, "bthd", "head_groups", [1, 1, 1]),  # sequences and segments form one axis
        (3, "bhtd", "head_groups", [1, 1, 1]),  # heads and segments form one axis
        # r = 4 has segments, blocks of heads, heads of a block: a call per block
        (1, "bthd", "longnet", [1, 4, 1]),
    ],
)
def test_a_branch_takes_as_few_calls_as_its_strides_allow(b: int, layout: str, mode: Any, calls: list[int]) -> None:
    x = torch.empty(b, 256, 16, 4).transpose(1, 2)
    x = x if layout == "bthd" else x.contiguous()
    found = pattern.branches((b, 16, 256), (x.stride()[:3],), (32, 64, 256), (1, 4, 16), mode)
    assert [len(branch.calls) for branch in found] == calls


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("mode", pattern.MODES)
def test_hopper_reads_strided_rows_without_a_copy(mode: Any) -> None:
    with FakeTensorMode():
        x = torch.empty(1, 65536, 16, 64, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
        found = pattern.branches((1, 16, 65536), (x.stride()[:3],), (2048, 8192, 32768), (1, 4, 16), mode)
        for branch in found:
            for call in branch.calls:
                view = call.of(x)
                assert view.stride(2) == branch.rate * x.stride(2)
                assert table.ATTENTION.select(Problem(view, view, view, Mask())).name == "hopper"


def test_the_mix_is_one_softmax_over_all_branches() -> None:
    """A pair of n branches counts n times: attention with bias log n."""
    case = Case(t=30, causal=True, segments=(7, 30, 16), rates=(1, 2, 3))
    got, (q, k, v, _) = run(case)
    counts = reference.pairs(case.h, case.t, case.segments, case.rates, mode="longnet", causal=True).sum(0)
    torch.testing.assert_close(got["o"], tilegrad.attention(q, k, v, bias=counts.double().log()[None]))


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("mode", pattern.MODES)
def test_gradients_pass_gradcheck(mode: Any, dropout_p: float) -> None:
    qkv = [x.requires_grad_() for x in tensors(Case(b=1, h=3, t=5, d=2, dv=1))[:3]]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = {"mode": mode, "causal": True, "dropout_p": dropout_p, "seed": 5}
        return dilated_attention(q, k, v, (2, 5, 4), (1, 2, 3), **options)

    assert torch.autograd.gradcheck(call, qkv, fast_mode=dropout_p > 0 or mode == "head_groups")


@pytest.mark.parametrize("mode", pattern.MODES)
def test_a_position_that_no_branch_covers_is_not_read_and_gives_0(mode: Any) -> None:
    case = Case(h=2, t=23, segments=(10, 12), rates=(3, 4), mode=mode)
    attended, _ = oracle(case)
    outside = ~attended.any(0).any(-1)
    *qkv, dy = tensors(case)
    assert outside.any()
    for x in qkv:
        x[:, outside] = torch.nan
    q, k, v = leaves = [x.requires_grad_() for x in qkv]
    y = dilated_attention(q, k, v, case.segments, case.rates, mode=mode)
    for x in (y, *torch.autograd.grad(y, leaves, dy)):
        assert not x[:, outside].any() and not x.isnan().any()


def test_a_tail_that_is_not_longer_than_its_offset_has_no_positions() -> None:
    q, k, v = tensors(Case(h=2, t=22, d=4))[:3]
    y = dilated_attention(q, k, v, (10, 10), (1, 4))  # group 1: offset 1; its tail, 20 and 21, has one position
    assert y[:, 1, 21].any() and not y[:, 1, 20].any()
    y = dilated_attention(q[:, :, :21], k[:, :, :21], v[:, :, :21], (10, 10), (1, 4))
    assert not y[:, 1, 20].any() and y[:, 0, 20].any()


def probabilities(mode: Any, **options: Any) -> Tensor:
    """The probabilities: y for one-hot values."""
    q, k, _, _ = tensors(Case(b=2, h=4, t=16, d=8))
    return dilated_attention(
        q, k, torch.eye(16, dtype=q.dtype).expand(2, 4, 16, 16), (8, 8), (1, 2), mode=mode, **options
    )


@pytest.mark.parametrize("mode", ["head_groups", "longnet"])
def test_dropout_drops_each_pair_of_a_branch_once(mode: Any) -> None:
    whole, dropped = probabilities(mode), probabilities(mode, dropout_p=0.4, seed=1)
    counts = reference.pairs(4, 16, (8, 8), (1, 2), mode=mode, causal=False).sum(0).expand_as(whole)
    ratio = dropped[counts == 1] / whole[counts == 1]  # a pair of two branches may be dropped in one of them
    kept = ratio > 0
    torch.testing.assert_close(ratio[kept], torch.full_like(ratio[kept], 1 / 0.6))
    assert 0.3 < 1 - float(kept.double().mean()) < 0.5
    assert torch.equal(dropped, probabilities(mode, dropout_p=0.4, seed=torch.tensor(1)))
    assert not torch.equal(dropped, probabilities(mode, dropout_p=0.4, seed=2))
    torch.manual_seed(0)
    drawn = probabilities(mode, dropout_p=0.4)
    assert not torch.equal(drawn, probabilities(mode, dropout_p=0.4))


def test_calls_of_one_seed_drop_differently() -> None:
    """Two groups of heads over the same segments are two calls."""
    dropped = probabilities("head_groups", dropout_p=0.5, seed=3) == 0
    whole = probabilities("head_groups") == 0
    assert not torch.equal(dropped[:, :2, 1::2, 1::2] & ~whole[:, :2, 1::2, 1::2], dropped[:, 2:, 1::2, 1::2])


def test_a_single_requested_gradient_has_the_bits_of_all_three() -> None:
    q, k, v, dy = tensors(Case())
    for wanted in range(3):
        a, b, c = leaves = [x.detach().requires_grad_(i == wanted) for i, x in enumerate((q, k, v))]
        y = dilated_attention(a, b, c, (8, 40), (1, 4), mode="longnet")
        (got,) = torch.autograd.grad(y, [leaves[wanted]], dy)
        assert torch.equal(got, run(Case())[0][NAMES[wanted + 1]])


def test_the_gradient_of_y_may_have_any_strides() -> None:
    """It may be expanded, or have another memory layout."""
    q, k, v = (x.requires_grad_() for x in tensors(Case())[:3])
    y = dilated_attention(q, k, v, (8, 40), (1, 4))
    for dy in (torch.ones(()).double().expand(y.shape), torch.randn(y.shape[::-1]).double().permute(3, 2, 1, 0)):
        got = torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)
        want = torch.autograd.grad(y, (q, k, v), dy.contiguous(), retain_graph=True)
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("shape", [(0, 4, 8, 4), (2, 4, 0, 4)])
@pytest.mark.parametrize("mode", pattern.MODES)
def test_empty_inputs_have_empty_results(shape: tuple[int, ...], mode: Any) -> None:
    q = torch.empty(shape, requires_grad=True)
    y = dilated_attention(q, q, q, (4,), (2,), mode=mode)
    y.sum().backward()
    assert y.shape == shape and q.grad is not None and q.grad.shape == shape


def test_the_dilated_result_has_the_memory_order_of_q() -> None:
    for layout in ("bthd", "bhtd"):
        q, k, v, _ = tensors(Case(layout=layout))
        assert dilated_attention(q, k, v, (8,), (1,)).stride() == q.stride()


def test_grad_vmap_and_autocast_work() -> None:
    q = torch.randn(3, 2, 4, 16, 8, dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        return dilated_attention(x, x, x, (8, 16), (1, 2), mode="longnet").square().sum()

    one_by_one = torch.stack([torch.func.grad(loss)(x) for x in q])
    for dim in (0, 3):
        got = torch.func.vmap(torch.func.grad(loss), dim)(q.movedim(0, dim))
        torch.testing.assert_close(got, one_by_one)
    with torch.autocast("cpu", torch.bfloat16):
        y = dilated_attention(q[0].float(), q[1].float(), q[2].float(), (8,), (2,))
    assert y.dtype == torch.bfloat16
    x = torch.randn(1, 4, 16, 8, requires_grad=True)
    (dx,) = torch.autograd.grad(dilated_attention(x, x, x, (8,), (1,)).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dx.sum().backward()


@pytest.mark.slow
def test_torch_compile_captures_the_whole_graph() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(Case(dtype=torch.float32))[:3])
    manager = tilegrad.memory.create_attention_buffer_manager()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dilated_attention(q, k, v, (8, 40), (1, 4), mode="longnet", manager=manager) * 2

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    y, want = compiled(q, k, v), call(q, k, v)
    assert torch.equal(y, want)
    grads, want_grads = (torch.autograd.grad(x.sum(), (q, k, v)) for x in (y, want))
    assert all(map(torch.equal, grads, want_grads))


X = torch.randn(1, 4, 8, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_mask": X}, "attn_mask: got .*accepted: None; dilated attention supports"),
        ({"bias": X}, "bias: got .*accepted: None"),
        ({"window": (3, 0)}, r"window: got \(3, 0\); accepted: None"),
        ({"sinks": X}, "sinks: got .*accepted: None"),
        ({"intervals": X}, "intervals: got a tensor; accepted: None; dilated attention supports only"),
        ({"k": X[:, :, :5], "v": X[:, :, :5]}, "k: got 5 positions, but q has 8; accepted: as many as q"),
        ({"k": X[:, :2], "v": X[:, :2]}, "k: got 2 heads, but q has 4; accepted: as many as q"),
        ({"q": X[:, :1], "k": X[:, :1], "v": X[:, :1]}, "q: got 1 heads for 2 branches; accepted: at least as many"),
        ({"segment_lengths": ()}, r"segment_lengths: got \(\); accepted: a sequence of ints ≥ 1"),
        ({"segment_lengths": (4, 0)}, r"segment_lengths: got \(4, 0\)"),
        ({"segment_lengths": 4}, "segment_lengths: got 4"),
        ({"dilation_rates": (1, True)}, r"dilation_rates: got \(1, True\)"),
        ({"dilation_rates": (1,)}, "dilation_rates: got 1 for 2 segment_lengths; accepted: one per branch"),
        ({"mode": "paper"}, "mode: got 'paper'; accepted: 'head_groups' or 'longnet'"),
        ({"kernel": "reference"}, "kernel: got 'reference'; accepted: None or a kernel other than 'reference'"),
        ({"kernel": "hopper"}, "kernel: got 'hopper', which can't run this call"),
        ({"dropout_p": 1.0}, r"dropout_p: got 1.0; accepted: a number p, 0 ≤ p < 1"),
        ({"q": X.transpose(2, 3)}, "q: got strides|k: got shape"),
    ],
)
def test_a_bad_argument_of_dilated_attention_is_named(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"q": X, "k": X, "v": X, "segment_lengths": (4, 8), "dilation_rates": (1, 2)} | changes
    with pytest.raises(ValueError, match=message):
        dilated_attention(**arguments)


def test_a_call_changes_no_global_setting_of_torch() -> None:
    def flags() -> tuple[Any, ...]:
        cuda = torch.backends.cuda
        return (
            torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(), torch.is_grad_enabled(),
            cuda.matmul.allow_tf32, cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
            torch.backends.cudnn.allow_tf32, torch.get_num_threads(), torch.get_default_dtype(), torch.initial_seed(),
        )  # fmt: skip

    before = flags()
    run(Case(dtype=torch.float32, options={"dropout_p": 0.1}))
    assert flags() == before
