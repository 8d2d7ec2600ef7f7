"""Attention over a cache: every kernel against the float64 oracle, and decoded rows against rows of the training forward."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from support.cases import Call, check_call
from support.interpreter import interpreting
from support.native import MISSING, needs_library
from support.ops import poisoned, randn
from support.pairwise import Spec, all_pairs, covering, pairs
from torch import Tensor

from tilegrad.kernels import gpu
from tilegrad.kernels.attention import Mask, attention_fwd, attention_workspace
from tilegrad.kernels.attention import cpu as native_attention
from tilegrad.kernels.cache_attention import (
    CACHE_ATTENTION,
    Problem,
    cache_attention_fwd,
    cache_attention_workspace,
    cache_write_fwd,
    cache_write_workspace,
    torch_ops,
)
from tilegrad.kernels.scratch import Form, blocks

KERNELS = ("torch", pytest.param("native", marks=needs_library), "triton")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _interpreted(request: pytest.FixtureRequest) -> Iterator[None]:
    """Triton's kernels run in the interpreter."""
    by_triton = "kernel" in request.fixturenames and request.node.callspec.params.get("kernel") == "triton"
    if by_triton:
        pytest.importorskip("triton", reason="needs Triton")
    with interpreting() if by_triton and not request.node.get_closest_marker("gpu") else nullcontext():
        yield


class Step(NamedTuple):
    """One new token of each sequence. The caches are NaN where there is no token yet."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    positions: Tensor
    mask: Mask
    n_head: int
    k_cache: Tensor
    v_cache: Tensor

    def run(self, kernel: str | None, *, o: Tensor | None = None) -> Tensor:
        b, hkv, capacity, d = self.k_cache.shape
        o = self.q.new_full((b, self.n_head * d), torch.nan) if o is None else o
        shapes = cache_attention_workspace(
            b, self.n_head, hkv, d, capacity, self.mask, self.q.dtype, self.q.device, kernel=kernel
        )
        scratch = {name: x.to(self.q.device) for name, x in poisoned(shapes).items()}
        caches: Any = {"k_cache": self.k_cache, "v_cache": self.v_cache}
        args = (*self[:5], self.n_head, hkv)
        cache_attention_fwd(*args, o=o, **caches, scratch=scratch, kernel=kernel)
        return o


AXES: dict[str, tuple[object, ...]] = {
    "dtype": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "heads": ((2, 1), (1, 3), (1, 9)),  # kv heads, and the query heads of each
    "d": (1, 16, 97, 300),
    "window": (None, (0, 0), (7, None), (70, 3)),
    "scale": (None, 0.3, -0.2),
    "softcap": (0.0, 2.0),
    "alibi": ("", "h", "bh"),
    "sinks": (False, True),
    "fused": (False, True),
    "capacity": (1, 70, 130),
}

INTERPRETED: dict[str, tuple[object, ...]] = {  # fewer values, because Triton's interpreter is slow
    "dtype": (torch.float32, torch.bfloat16, torch.float16), "heads": ((2, 1), (1, 3)), "d": (16, 33), "capacity": (1, 70),
    "window": (None, (7, None), (40, 3)), "alibi": ("", "bh"), "scale": (None, -0.2),
}  # fmt: skip


def step_of(spec: Spec, seed: int = 0) -> Step:
    (hkv, group), d, capacity, dtype = spec["heads"], spec["d"], spec["capacity"], spec["dtype"]
    positions = torch.tensor([*sorted({0, min(64, capacity - 1), capacity - 1}), capacity, -1])
    b, hq = len(positions), hkv * group
    qkv = randn(b, (hq + 2 * hkv) * d, dtype=dtype, seed=seed)
    q, k, v = (qkv, None, None) if spec["fused"] else (x.clone() for x in qkv.split([hq * d, hkv * d, hkv * d], 1))
    k_cache, v_cache = (randn(b, hkv, capacity, d, dtype=dtype, seed=seed + n) for n in (1, 2))
    for n, position in enumerate(positions.tolist()):
        for cache in (k_cache, v_cache):
            cache[n, :, position if 0 <= position < capacity else 0 :] = torch.nan
    extra: dict[str, Any] = {"sinks": randn(hq, dtype=torch.float32)} if spec["sinks"] else {}
    if spec["alibi"]:
        extra["alibi_slopes"] = randn(*((b,) if "b" in spec["alibi"] else ()), hq, dtype=torch.float32).abs() / 8
    mask = Mask(causal=True, window=spec["window"], scale=spec["scale"], softcap=spec["softcap"], **extra)
    return Step(q, k, v, positions, mask, hq, k_cache, v_cache)


def same(x: Tensor, y: Tensor) -> bool:
    """Whether the bits are equal."""
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def check(step: Step, kernel: str | None, given: Tensor | None = None) -> Tensor:
    """The cache has the new rows and is otherwise unchanged. o, or `given`, obeys the closeness rule for each sequence.
    Returns o."""
    b, hkv, capacity, d = step.k_cache.shape
    hq, before = step.n_head, (step.k_cache.clone(), step.v_cache.clone())
    found = step.run(kernel)
    o = (found if given is None else given).view(b, hq, 1, d)
    q, k, v = step.q, step.k, step.v
    if k is None or v is None:
        q, k, v = step.q.split([hq * d, hkv * d, hkv * d], 1)
    exp_error = native_attention.exp_error(q.dtype) if kernel == "native" else 0.0
    for n, position in enumerate(step.positions.tolist()):
        if not 0 <= position < capacity:
            assert torch.equal(o[n], torch.zeros_like(o[n])), f"position {position}"
            continue
        for cache, new in zip(before, (k, v), strict=True):
            cache[n, :, position] = new[n].view(hkv, d)
        slopes = step.mask.alibi_slopes
        mask = replace(step.mask, alibi_slopes=slopes[n] if slopes is not None and slopes.ndim == 2 else slopes)
        one = q[n].view(1, hq, 1, d)
        k_n, v_n = (cache[n : n + 1, :, : position + 1] for cache in before)
        check_call(Call(one, k_n, v_n, torch.ones_like(one), None, mask), {"o": o[n : n + 1]}, exp_error)
    for cache, wanted in zip((step.k_cache, step.v_cache), before, strict=True):
        torch.testing.assert_close(cache, wanted, rtol=0, atol=0, equal_nan=True)
    return found


def allowed(spec: Spec) -> bool:
    return spec.get("dtype") != torch.float16 or spec.get("d") != 1


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_pair_of_options_agrees_with_the_oracle(kernel: str) -> None:
    axes = AXES | INTERPRETED if kernel == "triton" else AXES
    specs = covering(axes, allowed)
    assert set.union(*map(pairs, specs)) == all_pairs(axes, allowed)
    for spec in specs:
        check(step_of(spec), kernel)


def test_a_batch_over_the_whole_capacity_agrees_with_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch kernel runs as on a GPU, where the host reads no position."""
    monkeypatch.setattr(torch_ops, "_sequences", lambda cache: min(4, cache.shape[0]))
    monkeypatch.setattr(torch_ops, "_columns", lambda _positions, _mask, capacity: blocks(capacity, 32))
    for spec in covering(AXES | INTERPRETED, allowed):
        check(step_of(spec), "torch")


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["torch", "triton"])
def test_results_on_a_device_are_close_and_a_captured_call_has_their_bits(kernel: str) -> None:
    for spec in covering(AXES | {"dtype": (torch.float32, torch.bfloat16, torch.float16)}, allowed):
        step = step_of(spec)
        tensors = {name: getattr(step.mask, name) for name in ("sinks", "alibi_slopes")}
        mask = replace(step.mask, **{name: x.cuda() for name, x in tensors.items() if x is not None})
        there: dict[str, Any] = {n: x.cuda() for n, x in step._asdict().items() if isinstance(x, Tensor)}
        check(step._replace(**there, mask=mask), kernel)
    step = step_of(PLAIN)
    assert step.mask.sinks is not None
    moved: dict[str, Any] = {n: x.cuda() for n, x in step._asdict().items() if isinstance(x, Tensor)}
    step = step._replace(**moved, mask=replace(step.mask, sinks=step.mask.sinks.cuda()))
    eager, o = step.run(kernel), step.q.new_empty(len(step.q), 64)
    shapes = cache_attention_workspace(len(step.q), 4, 2, 16, 70, step.mask, step.q.dtype, step.q.device, kernel=kernel)
    scratch = {name: x.cuda() for name, x in poisoned(shapes).items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        caches: Any = {"k_cache": step.k_cache, "v_cache": step.v_cache}
        cache_attention_fwd(*step[:5], 4, 2, o=o, **caches, scratch=scratch, kernel=kernel)
    graph.replay()
    assert same(o, eager)


PLAIN: Spec = {
    "dtype": torch.float32, "heads": (2, 2), "d": 16, "window": (20, None), "scale": None, "softcap": 0.0, "alibi": "",
    "sinks": True, "fused": True, "capacity": 70,
}  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS[:2])  # Triton's bounds equal those of torch
@pytest.mark.parametrize("wrong", ["left", "length", "sink", "scale"])
def test_canary_a_wrong_call_is_seen(kernel: str, wrong: str) -> None:
    step = step_of(PLAIN)
    sinks = step.mask.sinks
    assert sinks is not None
    positions = step.positions.clone()
    mask = {
        "left": replace(step.mask, window=(21, None)), "sink": replace(step.mask, sinks=sinks + 0.01),
        "scale": replace(step.mask, scale=0.2501), "length": step.mask,
    }[wrong]  # fmt: skip
    if wrong == "length":
        positions[1:3] -= 1
    o = step._replace(mask=mask, positions=positions).run(kernel)
    with pytest.raises(AssertionError, match="o: "):
        check(step_of(PLAIN), kernel, o)


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [*itertools.product(("torch", "native"), (torch.float32, torch.bfloat16)), ("triton", torch.bfloat16)],
)
def test_a_sequence_has_the_same_bits_in_any_batch(kernel: str, dtype: torch.dtype) -> None:
    if kernel == "native" and isinstance(MISSING, str):
        pytest.skip(f"the native kernel {MISSING}")
    step = step_of(PLAIN | {"dtype": dtype, "fused": False, "d": 24, "heads": (1, 2), "capacity": 70})
    together = step._replace(k_cache=step.k_cache.clone(), v_cache=step.v_cache.clone()).run(kernel)
    alone = (1,) if kernel == "triton" else range(3)
    for rows in (*(torch.tensor([n]) for n in alone), torch.tensor([2, 0, 1, 2])):
        assert step.k is not None and step.v is not None
        part = step._replace(
            q=step.q[rows], k=step.k[rows], v=step.v[rows], positions=step.positions[rows],
            k_cache=step.k_cache[rows], v_cache=step.v_cache[rows],
        )  # fmt: skip
        assert same(part.run(kernel), together[rows])


def trained(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """o of the native training forward for q, k, v (B, H, T, D), or packed (total, H, D)."""
    o, acc = torch.full_like(q, torch.nan), torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = torch.empty((q.shape[1], q.shape[0]) if mask.varlen else q.shape[:-1], dtype=acc)
    scratch = poisoned(attention_workspace(q, k, v, mask, backward=False, kernel="native"))
    attention_fwd(q, k, v, mask, o=o, lse=lse, scratch=scratch, kernel="native")
    return o


LENGTHS = (1, 63, 64, 65)  # lengths of packed sequences: 193 rows are three tiles and one row
INVARIANT: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "plain": (4, 4, 16, {}),
    "groups, window": (6, 2, 24, {"window": (17, None)}),
    "many queries, wide window": (9, 1, 40, {"window": (100, 0)}),
    "every option": (3, 3, 20, {"window": (70, None), "softcap": 2.0, "sinks": True, "alibi_slopes": True}),
}


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", INVARIANT)
def test_a_decoded_row_has_the_bits_of_the_training_row(name: str, dtype: torch.dtype) -> None:
    """One batch has every length from 1 to 193; its sequences are prefixes of one another."""
    hq, hkv, d, options = INVARIANT[name]
    numbers: dict[str, Tensor] = {
        n: randn(hq, dtype=torch.float32).abs() / 8 for n in options if n in ("sinks", "alibi_slopes")
    }
    given: dict[str, Any] = {**options, **numbers}
    mask = Mask(causal=True, **given)
    t = sum(LENGTHS)
    q, k, v = (randn(t, h, d, dtype=dtype, seed=h) for h in (hq, hkv, hkv))
    one_q, one_k, one_v = (x.transpose(0, 1)[None] for x in (q, k, v))
    dense = trained(one_q, one_k, one_v, mask)[0].transpose(0, 1)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    packing: Any = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 65, "max_seqlen_k": 65}
    packed = trained(q, k, v, replace(mask, **packing))
    for whole, starts in ((dense, [0]), (packed, ends[:-1].tolist())):
        first = torch.tensor([max(s for s in starts if s <= n) for n in range(t)])
        caches = torch.full((2, t, hkv, t, d), torch.nan, dtype=dtype)
        for n in range(t):
            for cache, x in zip(caches, (k, v), strict=True):
                cache[n, :, : n - first[n]] = x[first[n] : n].transpose(0, 1)
        positions = torch.arange(t) - first
        step = Step(q.view(t, -1), k.view(t, -1), v.view(t, -1), positions, mask, hq, caches[0], caches[1])
        assert same(step.run("native").view(t, hq, d), whole)


@needs_library
def test_the_number_of_threads_does_not_change_a_bit() -> None:
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(step_of(PLAIN).run("native"))
    finally:
        torch.set_num_threads(before)
    assert same(found[0], found[1]) and same(found[0], found[2])


@needs_library
def test_a_repeated_call_reads_the_new_numbers_in_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads positions, tokens and the cache again, and uses the instruction set of TILEGRAD_ISA."""
    step = step_of(PLAIN)
    o = step.q.new_empty(len(step.q), step.n_head * 16)
    scratch = poisoned(cache_attention_workspace(len(step.q), 4, 2, 16, 70, step.mask, step.q.dtype, CPU))
    for seed in range(3):
        fresh = step_of(PLAIN, seed)
        for x, y in zip((step.q, step.k_cache, step.v_cache), (fresh.q, fresh.k_cache, fresh.v_cache), strict=True):
            x.copy_(y)
        monkeypatch.setenv("TILEGRAD_ISA", "portable")
        caches: Any = {"k_cache": step.k_cache, "v_cache": step.v_cache}
        step.positions.copy_(fresh.positions - seed)
        cache_attention_fwd(*step[:5], 4, 2, o=o, **caches, scratch=scratch)
        assert same(o, fresh._replace(positions=fresh.positions - seed).run("native"))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
def test_rows_are_written_to_their_slots(kernel: str, dtype: torch.dtype, fused: bool) -> None:
    b, hkv, capacity, d, hq = 3, 2, 5, 6, 4
    before = randn(2, b, hkv, capacity, d, dtype=dtype)
    for slots in ([4, 0, -1, 14, 15, 7, 2**40, 8], [-1, 15], [9], []):
        n = len(slots)
        qkv = randn(n, (hq + 2 * hkv) * d, dtype=dtype, seed=1)
        k, v = qkv[:, hq * d : (hq + hkv) * d], qkv[:, (hq + hkv) * d :]
        caches, wanted = before.clone(), before.clone()
        for row, slot in enumerate(slots):
            if 0 <= slot < b * capacity:
                for cache, x in zip(wanted, (k, v), strict=True):
                    cache[slot // capacity, :, slot % capacity] = x[row].view(hkv, d)
        scratch = poisoned(cache_write_workspace(8, b, hkv, d, capacity, dtype, CPU, kernel=kernel))
        given: Any = {"k_cache": caches[0], "v_cache": caches[1], "scratch": scratch, "kernel": kernel}
        if fused:
            cache_write_fwd(qkv, None, torch.tensor(slots, dtype=torch.int64), hq, hkv, **given)
        else:
            cache_write_fwd(k, v, torch.tensor(slots, dtype=torch.int64), **given)
        assert same(caches, wanted)


def test_many_rows_are_written_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_ops, "ROWS", 3)
    k, v = randn(2, 10, 6)
    caches = torch.zeros(2, 2, 2, 6, 3, dtype=torch.float64)
    scratch = poisoned(cache_write_workspace(10, 2, 2, 3, 6, k.dtype, CPU, kernel="torch"))
    slots = torch.tensor([11, -1, 3, 99, -1, 12, 0, 5, 6, 7])
    cache_write_fwd(k, v, slots, k_cache=caches[0], v_cache=caches[1], scratch=scratch, kernel="torch")
    inside = (slots >= 0) & (slots < 12)
    got = caches[0].transpose(1, 2).reshape(12, 6)
    assert torch.equal(got[slots[inside]], k[inside])
    assert got.count_nonzero() == 6 * int(inside.sum())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "not causal": ({"causal": False}, "causal: got False; accepted: True, because a new token"),
    "dropout": ({"dropout_p": 0.1, "seed": 1}, "dropout_p: got 0.1; accepted: 0, because generation"),
    "bias": ({"bias": torch.zeros(1, 130)}, r"bias: got shape \(1, 130\); accepted: None, because"),
    "intervals": (
        {"intervals": torch.zeros(1, 1, 130, 2).int()},
        r"intervals: got shape \(1, 1, 130, 2\); accepted: None, because",
    ),
    "packed": ({"cu_seqlens_q": torch.zeros(2).int()}, r"cu_seqlens_q: got shape \(2,\); accepted: None, because"),
    "softcap": ({"softcap": -1.0}, "softcap: got -1.0; accepted"),
    "sinks": ({"sinks": torch.zeros(3)}, "sinks: got .*; accepted"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_masks_that_a_decoded_row_cannot_have_are_refused(name: str) -> None:
    options, message = REFUSED[name]
    step = step_of(PLAIN)
    mask = Mask(**{"causal": True} | options)
    caches: Any = {"k_cache": step.k_cache, "v_cache": step.v_cache}
    with pytest.raises(ValueError, match=message):
        cache_attention_fwd(*step[:4], mask, 4, 2, o=torch.empty(len(step.q), 64), **caches)
    if name not in ("softcap", "sinks"):
        with pytest.raises(ValueError, match=message):
            cache_attention_workspace(1, 4, 2, 16, 130, mask, torch.float32, CPU)


def test_tensors_that_do_not_fit_are_refused() -> None:
    step = step_of(PLAIN)
    o = torch.empty(len(step.q), 64)
    caches: Any = {"k_cache": step.k_cache, "v_cache": step.v_cache}
    mask, many = step.mask, len(step.q)

    def refused(message: str, *args: Any, **writes: Any) -> None:
        given = dict(o=o, **caches) | writes
        with pytest.raises((ValueError, TypeError), match=message):
            cache_attention_fwd(*(args or (*step[:4], mask, 4, 2)), **given)

    refused("n_kv_head: got 1; accepted: 2", *step[:4], mask, 4, 1)
    refused("q: got .*; accepted", *step[:4], mask, 3, 2)
    refused("v: got Tensor; accepted: None if k is None", step.q, None, step.q, step.positions, mask, 4, 2)
    refused("positions: got torch.int32", step.q, None, None, step.positions.int(), mask, 4, 2)
    refused("o: got", o=o[:1])
    refused("v_cache: got", v_cache=step.v_cache[:1])
    refused("k_cache: got .*; accepted: the strides", k_cache=step.k_cache.transpose(1, 2).contiguous().transpose(1, 2))
    refused("k_cache: got .*capacity", k_cache=step.k_cache[:, :, :0], v_cache=step.v_cache[:, :, :0])
    refused("o", o=step.k_cache.view(-1)[: many * 64].view(many, 64))
    refused("scratch: cache_attention got no")
    slots = torch.zeros(many, dtype=torch.int64)
    with pytest.raises(ValueError, match="n_head: got None; accepted: the number of query heads"):
        cache_write_fwd(step.q, None, slots, **caches)
    with pytest.raises(ValueError, match="n_kv_head: got 3; accepted: None or 2"):
        cache_write_fwd(step.q, None, slots, 4, 3, **caches)
    with pytest.raises(ValueError, match="slots: got"):
        cache_write_fwd(step.q, None, slots[:1], 4, 2, **caches)


def test_the_table_selects_a_kernel_for_each_call() -> None:
    cuda, cpu = (Problem(Form((1, 1, 1, 64), torch.bfloat16, torch.device(name)), 1) for name in ("cuda", "cpu"))
    assert "runs on the CPU, not on cuda" in CACHE_ATTENTION.rows[1].refuses(cuda)  # type: ignore[operator]
    assert "needs a CUDA device" in str(CACHE_ATTENTION.rows[0].refuses(cpu)) or gpu.interpreting()
    assert CACHE_ATTENTION.select(cpu).name == ("torch" if isinstance(MISSING, str) else "native")


SPLITS: dict[str, Spec] = {  # changes of PLAIN; a group of 17 has two blocks of rows in float32
    "float32": {"dtype": torch.float32, "heads": (1, 17), "window": None, "capacity": 330},
    "window": {"dtype": torch.bfloat16, "heads": (1, 2), "window": (150, None), "capacity": 700, "sinks": False},
    "softcap": {
        "dtype": torch.bfloat16,
        "heads": (1, 2),
        "window": None,
        "capacity": 333,
        "softcap": 2.0,
        "alibi": "bh",
    },
}


@pytest.mark.parametrize("kernel", ["triton"])
@pytest.mark.parametrize("name", SPLITS)
def test_results_of_splits_are_close_and_do_not_depend_on_the_capacity(
    kernel: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are more splits than are loaded together. The capacity and the rows after the position do not change a bit."""
    from tilegrad.kernels.cache_attention import triton_ops

    monkeypatch.setattr(triton_ops, "SPLIT", 64)
    o, step = check(step_of(PLAIN | SPLITS[name]), kernel), step_of(PLAIN | SPLITS[name])
    k_cache, v_cache = (torch.cat((x, torch.full_like(x, torch.inf)), 2) for x in (step.k_cache, step.v_cache))
    longer = step._replace(k_cache=k_cache, v_cache=v_cache)
    assert same(longer.run(kernel)[:3], o[:3])  # in a longer cache the fourth position is inside the capacity
