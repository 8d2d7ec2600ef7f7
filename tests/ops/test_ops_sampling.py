"""Sampling against an oracle in float64 NumPy and against transformers; every kernel has the same bits."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.interpreter import interpreting
from support.ops import poisoned, randn
from torch import Tensor

from tilegrad.kernels.closeness import Bound, assert_close, roundoff
from tilegrad.kernels.cpu import library as native_library
from tilegrad.kernels.sampling import (
    SAMPLING,
    Draws,
    logprobs_fwd,
    logprobs_workspace,
    sample_fwd,
    sample_workspace,
    torch_ops,
)
from tilegrad.kernels.sampling.elementary import CONSTANTS, exp_, log_, mass_bits
from tilegrad.kernels.scratch import larger
from tilegrad.kernels.table import Problem

Array = NDArray[np.float64]
KERNELS = ("torch", "native", "triton")
NO_FILTER = (1.0, 0.0, 1.0, 0.0, 1.0)  # temperature, top_k, top_p, min_p, repetition_penalty
SETTINGS = (
    NO_FILTER,
    (0.0, 3.0, 0.5, 0.5, 1.3),
    (0.7, 5.0, 1.0, 0.0, 1.0),
    (1.5, 0.0, 0.8, 0.0, 1.7),
    (0.9, 0.0, 1.0, 0.1, 0.6),
    (1.2, 40.0, 0.95, 0.02, 1.2),
    (3.0, 1000.0, 0.3, 0.001, 1.0),
    (1.0, 7.0, 0.6, 0.3, 2.0),
)


@contextmanager
def running(kernel: str) -> Iterator[None]:
    """Makes `kernel` run on this machine inside; skips the test if it cannot."""
    if kernel == "native" and isinstance(native_library.library(), str):
        pytest.skip(f"the native kernel {native_library.library()}")
    if kernel == "triton":
        pytest.importorskip("triton", reason="needs Triton")
        with interpreting():
            yield
    else:
        yield


class Drawn(NamedTuple):
    tokens: Tensor
    logprobs: Tensor
    seen: Tensor | None


def whole(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def draw(
    logits: Tensor, settings: Tensor, seeds: Tensor, sequences: Tensor, drawn: Tensor,
    seen: Tensor | None = None, *, kernel: str | None,
) -> Drawn:  # fmt: skip
    b = logits.shape[0]
    tokens, logprobs = torch.full((b,), -7), torch.full((b,), torch.nan, dtype=logits.dtype)
    seen = None if seen is None else seen.clone()
    scratch = poisoned(sample_workspace(logits, kernel=kernel))
    numbers = (settings, seeds, sequences, drawn)
    sample_fwd(logits, *numbers, tokens=tokens, logprobs=logprobs, seen=seen, scratch=scratch, kernel=kernel)
    return Drawn(tokens, logprobs, seen)


def logprobs_of(logits: Tensor, targets: Tensor, *, kernel: str | None = None) -> Tensor:
    out = torch.full((logits.shape[0],), torch.nan, dtype=logits.dtype)
    scratch = poisoned(logprobs_workspace(logits, kernel=kernel))
    logprobs_fwd(logits, targets, logprobs=out, scratch=scratch, kernel=kernel)
    return out


class Inputs(NamedTuple):
    logits: Tensor
    settings: Tensor
    seeds: Tensor
    sequences: Tensor
    drawn: Tensor
    seen: Tensor

    def rows(self, index: Tensor | slice) -> Inputs:
        return Inputs(*(x[index] for x in self))


def inputs(b: int, v: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """Inputs with every one of SETTINGS, and seeds and sequences that use all their bits."""
    generator = torch.Generator().manual_seed(seed * 1009 + v)
    settings = torch.tensor([SETTINGS[n % len(SETTINGS)] for n in range(b)])
    seeds, sequences = (torch.randint(-(1 << 62), 1 << 62, (b,), generator=generator) for _ in range(2))
    drawn = torch.randint(0, 1 << 32, (b,), generator=generator)
    seen = (torch.rand(b, v, generator=generator) < 0.3).to(torch.uint8)
    return Inputs(3 * randn(b, v, dtype=dtype, seed=seed), settings, seeds, sequences, drawn, seen)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_sequence_that_draws_no_token_does_not_change(kernel: str) -> None:
    x = inputs(4, 37)
    drawn = x.drawn.clone()
    drawn[[1, 2]] = -1
    with running(kernel):
        some, every = draw(*x[:4], drawn, x.seen, kernel=kernel), draw(*x, kernel="torch")
    idle = drawn < 0
    assert some.seen is not None and every.seen is not None
    assert some.tokens[idle].eq(-7).all() and some.logprobs[idle].isnan().all()
    assert torch.equal(some.seen[idle], x.seen[idle])
    for got, wanted in zip(some, every, strict=True):
        assert got is not None and wanted is not None and torch.equal(got[~idle], wanted[~idle])


def philox_words(seed: int, sequence: int, drawn: int, v: int) -> NDArray[np.uint64]:
    low = np.uint64(0xFFFFFFFF)
    c: list[NDArray[Any]] = [
        np.arange(v, dtype=np.uint64),
        *(np.full(v, n & 0xFFFFFFFF, np.uint64) for n in (drawn, sequence, sequence >> 32)),
    ]
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    for _ in range(10):
        x, y = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [y >> np.uint64(32) ^ c[1] ^ np.uint64(k0), y & low, x >> np.uint64(32) ^ c[3] ^ np.uint64(k1), x & low]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c[0]


class Filtered(NamedTuple):
    """z of the tokens, whether each is kept, and the smallest margin of a decision."""

    z: Array
    kept: NDArray[np.bool_]
    nearest: float


def filtered(logits: Array, settings: tuple[float, ...], seen: NDArray[Any]) -> Filtered:
    """The rule of transformers in float64, by sorting; equal logits are kept or removed together."""
    temperature, top_k, top_p, min_p, penalty = settings
    y = np.where(seen != 0, np.where(logits < 0, logits * penalty, logits / penalty), logits)
    z = (y - y.max()) / (temperature or 1.0)
    kept, nearest = np.ones(len(y), bool), math.inf
    if top_k and top_k < len(y):
        kept &= z >= np.sort(z)[-int(top_k)]
    p = np.where(kept, np.exp(z), 0.0)
    p /= p.sum()
    if top_p < 1:
        larger = np.array([p[z > one].sum() for one in z])
        nearest = min(nearest, np.abs(larger - top_p).min())
        kept &= larger < top_p
    nearest = min(nearest, np.abs(np.exp(z) - min_p).min() if min_p else math.inf)
    return Filtered(z, kept & (np.exp(z) >= min_p), nearest)


def oracle(logits: Array, settings: tuple[float, ...], seed: int, sequence: int, drawn: int, seen: NDArray[Any]) -> int:
    z, kept, _ = filtered(logits, settings, seen)
    if not settings[0]:
        return int(np.argmax(z))
    v = np.minimum((philox_words(seed, sequence, drawn, len(z)) + 0.5) / 2**32, 1 - 2.0**-24)
    return int(np.argmax(np.where(kept, z - np.log(-np.log1p(-v)), -np.inf)))


def logprob_bounds(logits: Tensor, targets: Tensor) -> dict[str, Bound]:
    """The roundings of l − max, four units of exp for each term, and those of x in exp(x). The rest is float64 or integers."""
    l = logits.double()
    x = l - l.amax(1, keepdim=True)
    b = (l.softmax(1) * (x.abs() + 4)).nan_to_num(0.0).sum(1)
    return {"logprobs": Bound(torch.zeros_like(b), b * roundoff(logits.dtype) * (targets >= 0))}


@pytest.mark.parametrize(
    ("kernel", "v"), [*itertools.product(("torch", "native"), (1, 2, 63, 300)), ("triton", 1), ("triton", 63)]
)
def test_tokens_and_logprobs_are_those_of_the_oracle(kernel: str, v: int) -> None:
    with running(kernel):
        x = inputs(64 if kernel != "triton" else 8 if v > 1 else 4, v)
        got = draw(*x, kernel=kernel)
    want = [
        oracle(x.logits[n].double().numpy(), tuple(map(float, x.settings[n])), int(x.seeds[n]), int(x.sequences[n]),
               int(x.drawn[n]), x.seen[n].numpy())
        for n in range(len(x.logits))
    ]  # fmt: skip
    assert got.tokens.tolist() == want
    exact = x.logits.double().log_softmax(1).gather(1, got.tokens[:, None])[:, 0]
    assert_close({"logprobs": got.logprobs}, {"logprobs": exact}, logprob_bounds(x.logits, got.tokens))
    assert got.seen is not None
    assert torch.equal(got.seen, x.seen.scatter(1, got.tokens[:, None], 1))


def test_results_in_float64_are_those_of_the_oracle() -> None:
    x = inputs(160, 503, torch.float64)
    assert x.logits.numel() > torch_ops.BLOCK["cpu"]
    got = draw(*x, kernel=None)
    exact = x.logits.log_softmax(1).gather(1, got.tokens[:, None])[:, 0]
    assert float((got.logprobs - exact).abs().max()) < 1e-12
    for n in (*range(8), *range(152, 160)):  # rows of the first block and of the last one, which is smaller
        numbers = int(x.seeds[n]), int(x.sequences[n]), int(x.drawn[n])
        settings = tuple(map(float, x.settings[n]))
        assert int(got.tokens[n]) == oracle(x.logits[n].numpy(), settings, *numbers, x.seen[n].numpy()), n


SIZES = ((1, 1.0), (7, 1e30), (64, 1.0), (65, 0.0), (1023, 1e30), (1024, 0.0), (1025, 1.0), (5000, 1.0))


@pytest.mark.parametrize(
    ("kernel", "v", "scale"),
    [
        *(("native", *size) for size in SIZES),
        *(("triton", *size) for size in ((7, 1e30), (64, 0.0), (5000, 1.0))),  # 904 of 5000 logits are in a second tile
    ],
)
def test_every_kernel_has_the_same_bits(kernel: str, v: int, scale: float) -> None:
    """The bits are equal also if all logits are equal, and if they overflow when divided by the temperature."""
    with running(kernel):
        x, two_tiles = inputs(8, v, seed=1), kernel == "triton" and v == 5000
        x = x.rows(slice(3)) if two_tiles else x
        x = x.rows(torch.tensor([2, 3, 5])) if kernel == "triton" and not scale else x  # top_k, top_p and every filter
        x = x._replace(logits=(x.logits * scale).masked_fill(x.seen.roll(1, 0) == 1, -torch.inf))
        x.logits[:, 0] = scale
        if two_tiles:  # the drawn token is in the second tile
            x.settings.copy_(
                torch.tensor(((0.0, 3.0, 0.5, 0.5, 1.3), (10.0, 0, 0.8, 0, 1.7), (10.0, 1000.0, 1, 0.9, 1)))
            )
            x.logits[:, 4096:] += 200
        want, got = draw(*x, kernel="torch"), draw(*x, kernel=kernel)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True) if a is not None and b is not None)


SMALL = {
    "CHUNK_TILE": 16,
    "SEGMENTS": 32,
    "FEW": 16,
    "LISTED": 32,
    "PROGRAMS": 5,
}  # 20 segments of 8 logits where V = 150


class Case(NamedTuple):
    """A row of logits with its settings, and where the kernel chooses the token: from the list of candidates, the whole row, or
    the best token of each chunk."""

    logits: Tensor
    settings: tuple[float, ...]
    source: str


def cases_of_lists() -> list[Case]:
    v = 150
    random, equal, spread = 3 * randn(v, dtype=torch.float32, seed=7), torch.full((v,), 2.0), torch.arange(v)
    some = random.clamp(max=5.0).masked_fill(spread % 7 == 0, 6.0)  # the largest value occurs 22 times
    peaked = torch.where(spread % 40 == 3, 9.0 + spread / 100, 0.1 * random)  # 4 tokens have 99 % of the mass
    few = torch.where(spread % 50 == 1, random, -torch.inf)
    close = 1.0 + 2.0**-20 * (spread % 9)  # at T = 200 many tokens have equal e
    return [
        Case(random, (90.0, 5.0, 1.0, 0.0, 1.5), "list"),
        Case(random, (90.0, 12.0, 0.7, 0.0, 1.0), "list"),
        Case(random, (9.0, 20.0, 0.6, 0.0, 1.0), "row"),  # every token is above the smallest of the maxima
        Case(random, (9.0, 21.0, 1.0, 0.0, 1.0), "row"),  # more tokens than segments
        Case(random, (0.05, 149.0, 0.9, 0.0, 1.0), "list"),  # e is 0 for most
        Case(some, (90.0, 5.0, 1.0, 0.0, 1.0), "list"),
        Case(some, (90.0, 16.0, 0.5, 0.0, 1.0), "list"),
        Case(equal, (1.0, 5.0, 1.0, 0.0, 1.0), "row"),
        Case(0.1 * random, (1.0, 0.0, 0.9, 0.0, 1.0), "row"),
        Case(0.1 * random, (1.0, 0.0, 0.01, 0.0, 1.0), "list"),  # keeps two tokens
        Case(close, (200.0, 0.0, 0.05, 0.0, 1.0), "row"),
        Case(peaked, (1.0, 0.0, 0.9, 0.0, 1.0), "list"),
        Case(peaked, (1.0, 0.0, 0.9, 0.4, 1.3), "list"),
        Case(peaked, (1.0, 0.0, 0.999, 0.0, 1.0), "row"),
        Case(few, (9.0, 40.0, 1.0, 0.0, 1.0), "list"),
        Case(few, (9.0, 0.0, 0.9, 0.0, 1.0), "list"),
        Case(random, (0.0, 5.0, 0.5, 0.0, 1.0), "chunks"),
        Case(random, (9.0, 0.0, 1.0, 0.3, 1.0), "chunks"),
    ]


def of_cases(cases: list[Case]) -> Inputs:
    x = inputs(len(cases), 150, seed=6)
    settings = torch.tensor([case.settings for case in cases])
    return x._replace(logits=torch.stack([case.logits for case in cases]), settings=settings)


def draw_by(module: Any, x: Inputs, monkeypatch: pytest.MonkeyPatch) -> tuple[Drawn, Tensor]:
    """The tokens that a module of Triton kernels draws, and the rows that it read whole: only those use the scratch `row`."""
    for name, value in SMALL.items():
        monkeypatch.setattr(module, name, value)
    with running("triton"):
        b, scratch = len(x.logits), poisoned(module.workspace(x.logits, draw=True))
        got = Drawn(torch.full((b,), -7), torch.full((b,), torch.nan), x.seen.clone())
        module.fwd(x.logits, Draws(*x[1:5]), **got._asdict(), scratch=scratch)
    return got, ~scratch["row"].isnan().all(1)


def test_tokens_of_a_list_of_candidates_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row has two chunks of five tiles, and two rows draw no token."""
    pytest.importorskip("triton", reason="needs Triton")
    from tilegrad.kernels.sampling import triton_ops

    x = of_cases(cases := cases_of_lists())
    x.drawn[[2, 9]] = -1
    want, (got, whole_row) = draw(*x, kernel="torch"), draw_by(triton_ops, x, monkeypatch)
    assert torch.equal(got.tokens, want.tokens) and torch.equal(got.logprobs.nan_to_num(), want.logprobs.nan_to_num())
    assert got.seen is not None and want.seen is not None and torch.equal(got.seen, want.seen)
    read = [case.source == "row" and int(before) >= 0 for case, before in zip(cases, x.drawn, strict=True)]
    assert whole_row.tolist() == read


@pytest.mark.parametrize(
    ("old", "new", "row"),
    [
        ("kth_largest(keys, segments_n, rank,", "kth_largest(keys, segments_n, 1,", 0),
        pytest.param("(top_k > 0) | (least > limit)", "(top_k > 0) | (least >= 0.0)", 8, marks=pytest.mark.slow),
        pytest.param(
            'tl.atomic_add(counts + b, n, sem="relaxed") +',
            "0 * tl.atomic_add(counts + b, n) +",
            5,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_canary_a_mistake_in_the_sampling_kernel_is_seen(
    old: str, new: str, row: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The mistakes: a bound that is too high, a list too short for top_p, chunks that write to the same place. The interpreter
    reads the source of a kernel from its file."""
    pytest.importorskip("triton", reason="needs Triton")
    from tilegrad.kernels.sampling import triton_ops

    source = Path(triton_ops.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1, old
    (path := tmp_path / "triton_ops.py").write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("tilegrad.kernels.sampling.changed", path)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(changed := importlib.util.module_from_spec(spec))
    x = of_cases(cases_of_lists()[row : row + 1] * 2)
    assert not torch.equal(draw_by(changed, x, monkeypatch)[0].tokens, draw(*x, kernel="torch").tokens)


def test_canary_a_token_kept_by_mistake_is_drawn() -> None:
    """At a high temperature the few kept tokens are equally likely, so a token that is kept by mistake is drawn soon."""
    with running("native"):
        x = inputs(512, 48, seed=4)
        x.settings.copy_(torch.tensor(NO_FILTER))
        x.settings[:, 0] = 200.0
        x.settings[:256, 1] = torch.arange(256) % 4 + 1.0
        x.settings[256:, 2] = (torch.arange(256) % 4 + 0.9) / 48
        x = x._replace(logits=x.logits * torch.logspace(-6, 1, 512)[:, None])
        assert torch.equal(draw(*x, kernel="native").tokens, draw(*x, kernel="torch").tokens)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("masses", [False, True])
def test_the_smallest_kept_key_in_triton_equals_that_of_numpy(masses: bool) -> None:
    pytest.importorskip("triton", reason="needs Triton")
    from support.sampling import smallest_key, smallest_listed_key

    for n in (0, 1, 5, 8, 11):
        x = 10.0 ** (n % 3) * randn(12, dtype=torch.float32, seed=n).repeat(2)  # every number occurs twice
        x = x.abs() / x.abs().max() if masses else x
        bits = x.view(torch.int32).numpy()
        keys = bits ^ (bits >> 31 & 0x7FFFFFFF)
        scale = 2.0**56
        mass = (x * scale + 0.5).long().numpy() if masses else np.ones(24, np.int64)
        bound = 0.08 * n * float(mass.sum()) + 0.5 if masses else float(2 * n + 1)
        want = min(key for key in keys if mass[keys > key].sum() < bound)
        assert smallest_key(x, bound, scale, masses=masses) == want, n
        for more in (0, 3):
            listed = smallest_listed_key(x, bound, scale, masses=masses, more=more)
            assert listed == want or not masses and listed < want and (keys >= listed).sum() <= bound + more, n
            assert masses or more or (keys >= listed).sum() == (keys >= want).sum(), n


def kept_by_draws(logits: Tensor, settings: tuple[float, ...], seen: Tensor, kernel: str | None) -> list[int]:
    """The tokens of so many draws that every kept token is among them."""
    n = 1500
    numbers = torch.tensor([settings]).expand(n, 5).contiguous(), whole(3).expand(n).contiguous(), torch.arange(n)
    got = draw(logits.expand(n, -1).contiguous(), *numbers, torch.zeros(n, dtype=torch.int64),
               seen.expand(n, -1).contiguous(), kernel=kernel)  # fmt: skip
    return [int(token) for token in got.tokens.unique()]


def cases_of_filters() -> list[tuple[Tensor, tuple[float, ...], Tensor]]:
    """Logits, settings and seen tokens for which no decision is close."""
    generator = torch.Generator().manual_seed(5)
    cases: list[tuple[Tensor, tuple[float, ...], Tensor]] = []
    while len(cases) < 16:
        top_k, top_p, min_p, penalty = torch.rand(4, generator=generator).tolist()
        settings: tuple[float, ...] = (
            1.0 + float(torch.rand(1, generator=generator)),
            float(round(12 * top_k)) if len(cases) % 2 else 0.0,
            top_p if len(cases) % 3 else 1.0,
            0.5 * min_p if len(cases) % 4 else 0.0,
            0.5 + 1.5 * penalty,
        )
        settings = tuple(torch.tensor(settings).tolist())  # float32
        logits, seen = 0.6 * torch.randn(12, generator=generator), torch.rand(12, generator=generator) < 0.4
        if filtered(logits.double().numpy(), settings, seen.numpy()).nearest > 1e-4:
            cases.append((logits, settings, seen.to(torch.uint8)))
    return cases


@pytest.mark.parametrize("kernel", ["torch", "native"])
def test_kept_tokens_are_those_of_the_oracle(kernel: str) -> None:
    with running(kernel):
        for logits, settings, seen in cases_of_filters():
            want = filtered(logits.double().numpy(), settings, seen.numpy()).kept
            assert kept_by_draws(logits, settings, seen, kernel) == np.flatnonzero(want).tolist(), settings


def test_kept_tokens_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs pip install 'tilegrad[hf]'")
    for logits, settings, seen in cases_of_filters():
        temperature, top_k, top_p, min_p, penalty = settings
        steps = [
            transformers.RepetitionPenaltyLogitsProcessor(penalty),
            transformers.TemperatureLogitsWarper(temperature),
            *([transformers.TopKLogitsWarper(int(top_k))] if top_k else []),
            *([transformers.TopPLogitsWarper(top_p)] if top_p < 1 else []),
            *([transformers.MinPLogitsWarper(min_p)] if min_p else []),
        ]
        tokens = seen.nonzero()[:, 0][None] if bool(seen.any()) else torch.zeros(1, 0, dtype=torch.int64)
        scores = logits[None].clone()
        for step in steps:
            scores = step(tokens, scores)
        want = scores[0].isfinite().nonzero()[:, 0].tolist()
        assert want == np.flatnonzero(filtered(logits.double().numpy(), settings, seen.numpy()).kept).tolist(), settings
        assert want == kept_by_draws(logits, settings, seen, None), settings


@pytest.mark.parametrize("kernel", ["torch", "native"])
@pytest.mark.parametrize(
    ("settings", "want"),
    [
        ((1.0, 2.0, 1.0, 0.0, 1.0), [0, 1, 2, 4]),  # the second largest logit occurs three times
        ((1.0, 4.0, 1.0, 0.0, 1.0), [0, 1, 2, 4]),
        ((1.0, 5.0, 1.0, 0.0, 1.0), [0, 1, 2, 3, 4]),
        ((1.0, 1.0, 1.0, 0.0, 1.0), [1]),
        # p is 0.460 for the largest, 0.169 for each of the three, then 0.023 and 0.008
        ((1.0, 0.0, 0.45, 0.0, 1.0), [1]),
        ((1.0, 0.0, 0.47, 0.0, 1.0), [0, 1, 2, 4]),  # all three equal tokens, although one would be enough
        ((1.0, 0.0, 0.96, 0.0, 1.0), [0, 1, 2, 4]),
        ((1.0, 0.0, 0.98, 0.0, 1.0), [0, 1, 2, 3, 4]),
        ((1.0, 0.0, 1.0, math.exp(-1) * 0.999, 1.0), [0, 1, 2, 4]),
        ((1.0, 0.0, 1.0, 1.0, 1.0), [1]),
    ],
)
def test_equal_logits_are_kept_or_removed_together(kernel: str, settings: tuple[float, ...], want: list[int]) -> None:
    with running(kernel):
        logits = torch.tensor([1.0, 2.0, 1.0, -1.0, 1.0, -2.0])
        assert kept_by_draws(logits, settings, torch.zeros(6, dtype=torch.uint8), kernel) == want


@pytest.mark.parametrize("kernel", KERNELS)
def test_zero_and_minus_zero_are_equal_logits(kernel: str) -> None:
    with running(kernel):
        n = 4
        logits, zero = torch.tensor([[0.0, -0.0, -1.0]]).repeat(n, 1), torch.zeros(n, dtype=torch.int64)
        settings = torch.tensor([[1.0, 1.0, 1.0, 0.0, 1.0]]).repeat(n, 1)
        assert draw(logits, settings, zero, torch.arange(n), zero, kernel=kernel).tokens.unique().tolist() == [0, 1]


VARIED = {"sequences": 0, "drawn": 1, "seeds": 2}


@pytest.mark.parametrize("kernel", ["torch", "native"])
@pytest.mark.parametrize("varied", VARIED)
def test_draws_have_their_probabilities(kernel: str, varied: str) -> None:
    """χ² of 20,000 draws with 9 degrees of freedom has mean 9 and deviation 4.24."""
    with running(kernel):
        n, logits = 20_000, torch.linspace(-2, 1.5, 10)
        numbers = [torch.full((n,), 7), torch.full((n,), 7), torch.full((n,), 7)]
        numbers[VARIED[varied]] = torch.arange(n)
        sequences, drawn, seeds = numbers
        settings = torch.tensor([[0.8, 0.0, 1.0, 0.0, 1.0]]).repeat(n, 1)
        got = draw(logits.repeat(n, 1), settings, seeds, sequences, drawn, kernel=kernel).tokens
    want = n * (logits.double() / 0.8).softmax(0)
    assert float(((got.bincount(minlength=10) - want).square() / want).sum()) < 9 + 5 * 4.24


@pytest.mark.parametrize("kernel", ["torch", "native"])
def test_sequences_seeds_and_positions_are_independent(kernel: str) -> None:
    """The correlation of n pairs of independent numbers has the deviation 1 / √n. The upper 32 bits are used too."""
    n, v = 1500, 40
    with running(kernel):
        settings, zero = torch.tensor([NO_FILTER]).repeat(n, 1), torch.zeros(n, dtype=torch.int64)
        first = (zero, zero, torch.arange(n))  # seeds, sequences, tokens drawn so far
        shifts = ((0, 1, 0), (0, 1 << 32, 0), (1, 0, 0), (1 << 32, 0, 0), (0, 0, 1 << 20))

        def tokens(numbers: tuple[Tensor, ...]) -> Tensor:
            return draw(torch.zeros(n, v), settings, *numbers, kernel=kernel).tokens.double()

        one = tokens(first)
        for shift in shifts:
            other = tokens(tuple(x + add for x, add in zip(first, shift, strict=True)))
            correlation = float(torch.corrcoef(torch.stack((one, other)))[0, 1])
            assert abs(correlation) < 4.5 / math.sqrt(n), shift
            assert float((one == other).double().mean()) < 3 / v, shift


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_token_of_a_row_depends_only_on_that_row(kernel: str) -> None:
    with running(kernel):
        x = inputs(64, 700, seed=2)
        x = x.rows(slice(3, 6)) if kernel == "triton" else x
        together, order = (
            draw(*x, kernel=kernel),
            torch.randperm(len(x.logits), generator=torch.Generator().manual_seed(1)),
        )
        moved = draw(*x.rows(order), kernel=kernel)
        assert torch.equal(moved.tokens, together.tokens[order])
        assert torch.equal(moved.logprobs, together.logprobs[order])
        for n in range(0, len(x.logits), 1 if kernel == "native" else 5):
            alone = draw(*x.rows(slice(n, n + 1)), kernel=kernel)
            assert torch.equal(alone.tokens, together.tokens[n : n + 1]), n
            assert torch.equal(alone.logprobs, together.logprobs[n : n + 1]), n


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("kernel", ["torch", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logprobs_of_a_row_depend_only_on_that_row(
    kernel: str, dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    """A row alone, in a batch of 16, in another order, with one thread and with two."""
    if kernel == "native" and dtype == torch.float64:
        pytest.skip("the native kernel takes float32")
    with running(kernel):
        n, v = 16, 33_001 if dtype == torch.float32 else 8209  # 33,001 logits are more than one thread of torch takes
        logits, targets = 4 * randn(n, v, dtype=dtype), torch.arange(n) * 511 % v
        targets[5] = -1
        order = torch.randperm(n, generator=torch.Generator().manual_seed(2))
        threads(1)
        want = logprobs_of(logits, targets, kernel=kernel)
        exact = logits.double().log_softmax(1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
        if dtype == torch.float64:
            assert float((want - exact * (targets >= 0)).abs().max()) < 1e-12
        else:
            assert_close({"logprobs": want}, {"logprobs": exact * (targets >= 0)}, logprob_bounds(logits, targets))
        assert torch.equal(logprobs_of(logits[order], targets[order], kernel=kernel), want[order])
        for count in (2, 1):
            threads(count)
            if count == 2:
                assert torch.equal(logprobs_of(logits, targets, kernel=kernel), want)
            for i in range(0, n, 5):
                one = slice(i, i + 1)
                assert torch.equal(logprobs_of(logits[one], targets[one], kernel=kernel), want[one]), (count, i)


@pytest.mark.parametrize("kernel", KERNELS)
def test_logprobs_have_the_bits_of_samples(kernel: str) -> None:
    with running(kernel):
        x = inputs(8, 900, seed=3).rows(slice(4, 6) if kernel == "triton" else slice(8))
        got = draw(*x, kernel=kernel)
        assert torch.equal(logprobs_of(x.logits, got.tokens, kernel=kernel), got.logprobs)
        assert torch.equal(logprobs_of(x.logits, got.tokens, kernel="torch"), got.logprobs)


@pytest.mark.parametrize("kernel", KERNELS)
def test_strided_rows_have_the_same_tokens(kernel: str) -> None:
    with running(kernel):
        x = inputs(6, 130).rows(slice(3, 6))
        wide, wide_seen = torch.full((3, 200), torch.nan), torch.full((3, 150), 1, dtype=torch.uint8)
        wide[:, 7:137], wide_seen[:, 3:133] = x.logits, x.seen
        apart = x._replace(logits=wide[:, 7:137])
        want, tokens, logprobs = draw(*x, kernel="torch"), torch.empty(3, dtype=torch.int64), torch.empty(3)
        scratch = poisoned(sample_workspace(apart.logits, kernel=kernel))
        given = {"tokens": tokens, "logprobs": logprobs, "seen": wide_seen[:, 3:133]}
        sample_fwd(*apart[:5], **given, scratch=scratch, kernel=kernel)
        assert torch.equal(tokens, want.tokens) and torch.equal(logprobs, want.logprobs)
        assert want.seen is not None and torch.equal(wide_seen[:, 3:133], want.seen)
        assert bool((wide_seen[:, :3] == 1).all())


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_that_are_not_finite_have_no_token(kernel: str) -> None:
    with running(kernel):
        x = inputs(5, 100)
        x.logits[0, 99], x.logits[1, 5], x.logits[2], x.logits[3, 1:] = torch.nan, torch.inf, -torch.inf, -torch.inf
        got = draw(*x, kernel=kernel)
        right = draw(*x.rows(slice(4, 5)), kernel=kernel)
        assert got.tokens.tolist() == [-1, -1, -1, 0, int(right.tokens)]
        assert got.logprobs.tolist() == [0.0, 0.0, 0.0, 0.0, float(right.logprobs)]
        assert got.seen is not None
        assert torch.equal(got.seen[:3], x.seen[:3]), "a row without a token stays as it is"
        again = logprobs_of(x.logits, whole(0, 0, 0, 1, -1), kernel=kernel).tolist()
        assert all(map(math.isnan, again[:3])) and again[3:] == [-math.inf, 0.0]


@pytest.mark.parametrize("kernel", KERNELS)
def test_extreme_settings_give_the_expected_tokens(kernel: str) -> None:
    """A tiny temperature takes the largest logit, a huge one draws uniformly. A penalty beyond float32 stays finite."""
    with running(kernel):
        largest, tiny = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
        logits, seen = torch.tensor([[10.0, 30.0, -20.0, 20.0]]).repeat(6, 1), torch.ones(6, 4, dtype=torch.uint8)
        rows: list[tuple[float, ...]] = [
            (tiny, 0, 1, 0, 1),
            (largest, 0, 1, 0, 1),
            (0, 0, 1, 0, tiny),
            (1, 0, 1, 0, largest),
        ]
        rows += [(1, 0, tiny, 0, 1), (1, 4, 1, 0, 1)]
        zero = torch.zeros(6, dtype=torch.int64)
        got = draw(logits, torch.tensor(rows).float(), zero, zero, zero, seen, kernel=kernel).tokens
        want = draw(logits, torch.tensor(rows).float(), zero, zero, zero, seen, kernel="torch").tokens
        assert torch.equal(got, want)
        assert int(got[0]) == 1 and int(got[2]) == 0 and int(got[4]) == 1  # l / tiny: the first of the largest
        assert int(got[3]) != 2


def test_exp_and_log_err_by_two_units() -> None:
    for dtype, constants in CONSTANTS.items():
        n = 20_000
        eps, work = torch.finfo(dtype).eps, torch.empty(2, n, dtype=dtype)
        bits, flags = torch.empty(n, dtype=constants.integer), torch.empty(n, dtype=torch.bool)
        x = torch.linspace(0.9 * constants.least, 0, n, dtype=dtype)
        exact = np.exp(x.numpy().astype(np.longdouble))
        assert float(abs(exp_(x.clone(), work, bits, flags).numpy() / exact - 1).max()) < 2 * eps
        ends = torch.tensor([0.0, -torch.inf, 2 * constants.least]).to(dtype)
        assert exp_(ends, work[:, :3], bits[:3], flags[:3]).tolist() == [1, 0, 0]
        x = torch.cat((torch.logspace(-12, 12, n // 2, dtype=dtype), torch.linspace(0.5, 1.5, n // 2, dtype=dtype)))
        x[x == 1] = 2
        exact = np.log(x.numpy().astype(np.longdouble))
        assert float(abs(log_(x.clone(), work, bits).numpy() / exact - 1).max()) < 3 * eps
    assert mass_bits(1) == 62 and mass_bits(2) == 61 and mass_bits(50257) == 46 and mass_bits(65537) == 45


def test_errors_of_sampling_name_the_argument() -> None:
    x = inputs(2, 9)
    tokens, logprobs = torch.empty(2, dtype=torch.int64), torch.empty(2)

    def run(**changed: Any) -> None:
        given: dict[str, Any] = {**x._asdict(), "tokens": tokens, "logprobs": logprobs} | changed
        reads = [given.pop(name) for name in ("logits", "settings", "seeds", "sequences", "drawn")]
        sample_fwd(*reads, **given, scratch=poisoned(sample_workspace(x.logits)))

    def row(column: int, value: float) -> Tensor:
        settings = torch.tensor([NO_FILTER, NO_FILTER])
        settings[1, column] = value
        return settings

    run()
    for changed, message in (
        ({"logits": x.logits.bfloat16()}, r"logits: got torch.bfloat16 \(2, 9\); accepted: \(B, V\), torch.float32 or"),
        ({"logits": x.logits[0]}, r"logits: got torch.float32 \(9,\)"),
        ({"logits": x.logits.t().contiguous().t()}, r"logits: got strides \(1, 2\)"),
        ({"logits": torch.empty(2, 0)}, "logits: got 0 columns; accepted: 1 … 16777216"),
        ({"settings": x.settings[:, :4]}, r"settings: got torch.float32 \(2, 4\) on cpu; accepted: torch.float32 \(2, 5\)"),
        ({"settings": row(0, -0.5)}, "settings: got temperature -0.5 in row 1; accepted: a finite number ≥ 0"),
        ({"settings": row(0, math.nan)}, "settings: got temperature nan in row 1"),
        ({"settings": row(1, 2.5)}, "settings: got top_k 2.5 in row 1; accepted: a whole number ≥ 0, 0 = all"),
        ({"settings": row(1, -1)}, "settings: got top_k -1 in row 1"),
        ({"settings": row(2, 0)}, r"settings: got top_p 0 in row 1; accepted: a number in \(0, 1\]"),
        ({"settings": row(2, 1.5)}, "settings: got top_p 1.5 in row 1"),
        ({"settings": row(3, -0.1)}, r"settings: got min_p -0.1 in row 1; accepted: a number in \[0, 1\]"),
        ({"settings": row(4, 0)}, "settings: got repetition_penalty 0 in row 1; accepted: a finite number > 0"),
        ({"settings": row(4, 2), "seen": None}, "repetition_penalty 2 without seen in row 1; accepted: 1, or seen"),
        ({"seeds": x.seeds.int()}, r"seeds: got torch.int32 \(2,\)"),
        ({"sequences": x.sequences[:1]}, r"sequences: got torch.int64 \(1,\)"),
        ({"drawn": x.drawn.new_tensor([0, -2])}, "drawn: got -2; accepted: 0 … 2³² − 1, or −1 for no draw"),
        ({"drawn": x.drawn.new_tensor([0, 1 << 32])}, "drawn: got 4294967296"),
        ({"drawn": torch.zeros(4, dtype=torch.int64)[::2]}, r"drawn: got strides \(2,\); accepted: contiguous"),
        ({"tokens": logprobs}, r"tokens: got torch.float32 \(2,\)"),
        ({"logprobs": logprobs.double()}, r"logprobs: got torch.float64 \(2,\)"),
        ({"seen": x.seen.bool()}, r"seen: got torch.bool \(2, 9\)"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            run(**changed)
    for targets, message in (
        (whole(0, 9), "targets: got 9; accepted: 0 … 8, or −1"),
        (whole(-2, 0), "targets: got -2"),
    ):
        with pytest.raises(ValueError, match=message):
            logprobs_of(x.logits, targets)
    with pytest.raises(ValueError, match="which can't run this call: takes float32, not float64; accepted: 'torch'"):
        SAMPLING.select(Problem(x.logits.double()), "native")
    nothing = x.rows(slice(0, 0))
    assert draw(*nothing, kernel=None).tokens.shape == (0,)


def changed_in(module: Any, name: str, old: str, new: str) -> Any:
    """A copy of a module's function with one change of its source."""
    import inspect

    source = inspect.getsource(getattr(module, name))
    assert source.count(old) == 1, f"{old!r} in {name}"
    space = dict(vars(module))
    exec(compile(source.replace(old, new), module.__file__, "exec", flags=0x1000000), space)  # annotations stay strings
    return space[name]


INDEPENDENT, KEPT = test_sequences_seeds_and_positions_are_independent, test_kept_tokens_are_those_of_the_oracle


@pytest.mark.parametrize(
    ("name", "old", "new", "check"),
    [
        ("_noise", "torch.bitwise_and(sequences,", "torch.bitwise_and(drawn,", INDEPENDENT),
        ("_noise", "bitwise_right_shift(sequences, 32", "bitwise_right_shift(sequences, 63", INDEPENDENT),
        ("_smallest_of_top_p", ".sub_(masses))", ")", KEPT),
        ("_smallest_of_top_k", ".sub_(1)", "", KEPT),
        ("_penalise", "torch.eq(seen, 0,", "torch.eq(seen, 2,", KEPT),
        ("_penalise", "torch.lt(l, 0.0", "torch.gt(l, 0.0", KEPT),
    ],
)
def test_canary_a_wrong_kernel_is_seen(
    name: str, old: str, new: str, check: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mistakes: noise that ignores the sequence, top_p and top_k off by one token, a penalty on unseen tokens."""
    monkeypatch.setattr(torch_ops, name, changed_in(torch_ops, name, old, new))
    with pytest.raises(AssertionError):
        check("torch")


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["triton", "torch"])
@pytest.mark.parametrize("v", [63, 50257, 151936])
def test_bits_on_the_device_equal_those_on_the_cpu(kernel: str, v: int) -> None:
    """They are equal also in a captured graph."""
    x = inputs(8, v)
    want = draw(*x, kernel="torch")
    reads = [t.cuda() for t in x[:5]]
    tokens, logprobs, again = torch.empty(8, dtype=torch.int64).cuda(), torch.empty(8).cuda(), torch.empty(8).cuda()
    seen = x.seen.cuda()
    shapes = larger(sample_workspace(reads[0], kernel=kernel), logprobs_workspace(reads[0], kernel=kernel))
    scratch = {name: buffer.cuda() for name, buffer in poisoned(shapes).items()}

    def run() -> None:
        sample_fwd(*reads, tokens=tokens, logprobs=logprobs, seen=seen, scratch=scratch, kernel=kernel)
        logprobs_fwd(reads[0], tokens, logprobs=again, scratch=scratch, kernel=kernel)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for replay in (graph.replay, graph.replay, run):
        seen.copy_(x.seen)
        replay()
        assert want.seen is not None
        assert torch.equal(tokens.cpu(), want.tokens) and torch.equal(logprobs.cpu(), want.logprobs)
        assert torch.equal(again, logprobs) and torch.equal(seen.cpu(), want.seen)
