"""The Triton kernels against the oracle in Triton's interpreter, in a separate process, because it is chosen at import.

test_triton_compile.py compiles the kernels without a GPU; test_triton_gpu.py runs them on a GPU.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.cases import LARGE_SCORES, WITH_LARGE_SCORES, Case, Tensors, build, check_call, oracle, run
from support.forked import python
from support.interpreter import INTERPRETED, in_the_interpreter, interpreted
from support.ops import randn
from support.pairwise import Spec, all_pairs, pairs
from support.triton_specs import AXES, allowed, case_of, specs

import tilegrad
from tilegrad.kernels.attention import Mask, attention_bwd, attention_fwd, attention_workspace
from tilegrad.kernels.attention.triton import tiles
from tilegrad.kernels.scratch import new_scratch

pytest.importorskip("triton", reason="needs Triton")
IN_CI = 8  # number of specifications in CI, because the interpreter is slow; the slow set has all


def check(case: Case, seed: int = 0) -> None:
    call = build(case, seed)
    check_call(call, run(call, "triton"))


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter")
def test_these_tests_pass_in_the_interpreter() -> None:
    """It also runs the files of invariant problems and of intervals, because starting a process takes two seconds."""
    others = (str(Path(__file__).with_name(f"test_triton_{name}.py")) for name in ("ordered", "intervals"))
    in_the_interpreter(__file__, *others, "-k", "interpreted")


@pytest.mark.skipif(INTERPRETED, reason="runs outside it")
def test_band_tiles_of_every_small_case_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop visits exactly the tiles with an attended pair. A tile is unmasked if all its pairs are attended."""
    from tilegrad.kernels.attention.triton import scores

    monkeypatch.setattr(scores, "tl", SimpleNamespace(maximum=max, minimum=min))
    bounds = (None, 0, 1, 3)
    for start, length, size, block in itertools.product((0, 2), (1, 2, 3), (0, 1, 4, 5, 7), (1, 2, 3)):
        run_of = range(start, start + length)
        for shift, back, ahead in itertools.product(range(-4, 5), bounds, bounds):
            given = (start, start + length, shift, back, ahead, size, block)
            first, unmasked, unmasked_end, last = scores.band_tiles.fn(*given)
            attended = [
                {
                    j
                    for j in range(size)
                    if (back is None or j >= i + shift - back) and (ahead is None or j <= i + shift + ahead)
                }
                for i in run_of
            ]
            some, all_of = set.union(*attended), set.intersection(*attended)
            want = {j // block for j in some}
            whole = {t for t in want if all_of >= set(range(t * block, (t + 1) * block))}
            assert set(range(unmasked, unmasked_end)) == whole, given
            assert first <= unmasked <= unmasked_end <= last, given
            assert set(range(first, last)) == want or (not want and last - first <= 1), given


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="is the interpreter")
def test_every_specification_agrees_with_the_oracle_in_the_interpreter() -> None:
    in_the_interpreter(__file__, "-k", "every_pair or interpreted", "--slow")


BASE = Case(b=1, hkv=1, tq=37, tk=45)
FEATURES = {
    "plain": replace(BASE, b=2, hkv=2),
    "half, causal, groups": replace(BASE, causal=True, group=2, dtype=torch.float16),
    "rows that see nothing": replace(BASE, tq=50, tk=20, causal=True, dlse=True, sinks=True),
    "packed": replace(BASE, lengths=((5, 9), (0, 3), (40, 33), (7, 0)), causal=True),
    "decoding, split": replace(BASE, tq=3, tk=113, causal=True, sinks=True, dropout_p=0.25, group=2),
    "no columns": replace(BASE, tk=0, sinks=True, dlse=True),
    "scale 0": replace(BASE, scale=0.0, causal=True),
    "everything": replace(
        BASE, causal=True, window=(20, 3), softcap=3.0, bias="hk", alibi="bh", sinks=True, dropout_p=0.2, dlse=True,
        scale=-0.3, layout="fused", d=5, dv=19,
    ),
}  # fmt: skip

# features that CI also runs as where float64 is slow
IN_BOTH = ("rows that see nothing", "decoding, split", "everything")


@cache
def results_of(name: str) -> Tensors:
    return run(build(FEATURES[name]), "triton")


@interpreted
@pytest.mark.parametrize("name", FEATURES)
def test_interpreted_feature_agrees_with_the_oracle(name: str) -> None:
    check_call(build(FEATURES[name]), results_of(name))


@interpreted
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in IN_BOTH))
        for name, case in FEATURES.items()
        if case.dtype == torch.float32
    ],
)
def test_interpreted_feature_agrees_with_the_oracle_where_float64_is_slow(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilegrad.kernels.attention import api
    from tilegrad.kernels.attention.triton import fit

    want, call = results_of(name), build(FEATURES[name])
    monkeypatch.setattr(fit, "FAST_FLOAT64", ())
    monkeypatch.setattr(api, "prepared_calls", {})  # a device never changes whether its float64 is slow
    got = run(call, "triton")
    check_call(call, got)
    assert name == "no columns" or any(not torch.equal(got[x], want[x]) for x in want)


@interpreted
@pytest.mark.parametrize("name", ["plain", "decoding, split", "everything"])
def test_interpreted_float32_is_rounded_once(name: str) -> None:
    """o and lse are those of float64, rounded, with a scale in float32."""
    call = build(replace(FEATURES[name], scale=-0.25))
    got, exact = run(call, "triton"), oracle(call)
    for x in ("o", "lse"):
        unit = exact[x].abs().log2().floor().exp2() * torch.finfo(torch.float32).eps
        assert ((got[x].double() - exact[x]).abs() <= 0.501 * unit).all(), x


def in_small(spec: Spec, number: int) -> None:
    check(case_of(spec, random.Random(number), "cpu", t=51, small=True), seed=number)


@interpreted
@pytest.mark.parametrize("number", range(IN_CI))
def test_interpreted_pairs_of_features_agree_with_the_oracle(number: int) -> None:
    in_small(specs()[number], number)


@interpreted
@pytest.mark.slow
def test_every_pair_of_features_agrees_with_the_oracle() -> None:
    for number, spec in enumerate(specs()):
        in_small(spec, number)


def check_large_scores(name: str, dtype: torch.dtype, size: float) -> None:
    """Also checks the kernels for slow float64, which compute scores in float32 differently."""
    from tilegrad.kernels.attention import api
    from tilegrad.kernels.attention.triton import fit

    case = replace(WITH_LARGE_SCORES[name], dtype=dtype, scores=size)
    check(case)
    if dtype == torch.float32:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fit, "FAST_FLOAT64", ())
            patch.setattr(api, "prepared_calls", {})
            check(case)


@interpreted
@pytest.mark.parametrize(
    ("name", "dtype", "size"),
    [
        ("causal", torch.bfloat16, 1e10),
        ("causal", torch.float32, 1e6),
        ("softcap", torch.bfloat16, 1e4),
        ("alibi", torch.float32, 1e6),
    ],
)
def test_interpreted_large_scores_are_as_exact_as_small_ones(name: str, dtype: torch.dtype, size: float) -> None:
    check_large_scores(name, dtype, size)


@interpreted
@pytest.mark.slow
def test_every_pair_of_a_feature_and_a_large_score_agrees_with_the_oracle() -> None:
    for name, dtype, size in itertools.product(WITH_LARGE_SCORES, (torch.float32, torch.bfloat16), LARGE_SCORES):
        check_large_scores(name, dtype, size)


@interpreted
def test_interpreted_canary_one_wrong_score_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilegrad.kernels.attention.triton import forward as triton_fwd
    from tilegrad.kernels.attention.triton import scores

    right = scores.scores

    def wrong(s, i, j, head, IEEE_FP32, MASKED):
        x, t = right(s, i, j, head, IEEE_FP32, MASKED)
        return x + 0.2 * ((i == 33) & (j == 16)), t

    monkeypatch.setattr(triton_fwd, "scores", wrong)
    with pytest.raises(AssertionError, match="error"):
        check(BASE)


@interpreted
def test_interpreted_canary_a_skipped_tile_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilegrad.kernels.attention.triton import backward as triton_bwd
    from tilegrad.kernels.attention.triton import scores

    right = scores.band_tiles

    def wrong(start, stop, shift, back, ahead, size, BLOCK):
        first, full, full_end, last = right(start, stop, shift, back, ahead, size, BLOCK)
        return first, full, full_end, last - (start == 32)

    monkeypatch.setattr(triton_bwd, "band_tiles", wrong)
    with pytest.raises(AssertionError, match="error"):
        check(BASE)


@interpreted
# in half precision accumulators start at −lse and −delta
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_interpreted_dk_and_dv_in_separate_passes_agree_with_the_oracle(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    from tilegrad.kernels.attention.triton import fit

    case = replace(BASE, dtype=dtype)
    key = (tiles.INTERPRETER, 32, 64, False)
    together = tiles.TABLE[key]
    want = run(build(case), "triton")
    monkeypatch.setattr(fit, "fits", {})
    tiles.set_row(key, together._replace(dk=together.dkdv, dv=together.dkdv))
    try:
        got = run(build(case), "triton")
    finally:
        tiles.set_row(key, together)
    assert {found.kernel for found in fit.fits.values()} == {"fwd", "dk", "dv", "dq"}
    assert all(torch.equal(got[name], want[name]) for name in want)


@interpreted
def test_interpreted_call_may_have_more_sequences_than_a_grid_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilegrad.kernels.attention.triton import launch

    small = replace(BASE, b=3, tq=20, tk=17)
    for case in (small, replace(small, dtype=torch.float16), FEATURES["packed"]):
        want = run(build(case), "triton")
        monkeypatch.setattr(launch, "MOST_SEQUENCES", 2)
        got = run(build(case), "triton")
        monkeypatch.undo()
        assert all(torch.equal(got[name], want[name]) for name in want)


@interpreted
def test_interpreted_bias_may_have_offsets_beyond_32_bits() -> None:
    """The bias is transposed. Memory between its columns is never touched, so it costs none."""
    tq, tk, step = 20, 34, 2**26
    memory = torch.empty(tk * step, dtype=torch.bool)
    bias = memory.as_strided((1, 1, tq, tk), (0, 0, 1, step))
    call = build(replace(BASE, tq=tq, tk=tk, bias="QK"))
    assert call.mask.bias is not None
    bias.copy_(call.mask.bias)
    want = run(call, "triton")
    got = run(replace(call, mask=replace(call.mask, bias=bias)), "triton")
    assert memory.numel() > 2**31 and all(torch.equal(got[name], want[name]) for name in want)


@interpreted
def test_interpreted_output_given_as_none_is_not_computed() -> None:
    from tilegrad import attention_bwd, attention_workspace

    call = build(replace(BASE, tq=18, tk=20, bias="hqk", sinks=True, dropout_p=0.2))
    call = replace(call, mask=replace(call.mask, seed=2**64 - 5))  # an int, so that the scratch holds the seed
    want = run(call, "triton")
    q, k, v, mask = call.q, call.k, call.v, call.mask
    shapes = attention_workspace(q, k, v, mask, backward=True)
    scratch = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    names = ("dq", "dk", "dv", "dbias", "dsinks")
    for alone in names:
        outputs: dict[str, Any] = {name: torch.zeros_like(want[name]) if name == alone else None for name in names}
        attention_bwd(q, k, v, want["o"], want["lse"], call.do, None, mask, **outputs, scratch=scratch)
        assert torch.equal(outputs[alone], want[alone]), alone


@pytest.mark.skipif(INTERPRETED, reason="is about the compiler")
def test_the_table_says_why_triton_cannot_run_a_call() -> None:
    q = torch.randn(1, 1, 4, 4)
    assert "TRITON_INTERPRET=1" in tilegrad.explain(q, q, q).reasons["triton"]
    assert "float64" in tilegrad.explain(q.double(), q.double(), q.double()).reasons["triton"]
    many = torch.zeros(1, 1, 1, 4).expand(1, 65536, 1, 4)
    assert "up to 65535 kv heads" in tilegrad.explain(many, many, many).reasons["triton"]
    assert "kv heads" not in tilegrad.explain(many[:, 1:], many[:, 1:], many[:, 1:]).reasons["triton"]
    with pytest.raises(
        ValueError, match=r"kernel: got 'triton', which can't run this call.*accepted: '(native|tiled)'"
    ):
        tilegrad.attention(q, q, q, kernel="triton")


@pytest.mark.skipif(INTERPRETED, reason="is about the compiler")
def test_triton_is_imported_only_when_a_kernel_of_it_runs() -> None:
    code = (
        "import sys, torch, tilegrad\n"
        "q = torch.randn(1, 1, 4, 4)\n"
        "tilegrad.attention(q, q, q); tilegrad.explain(q, q, q)\n"
        "assert 'tilegrad.kernels.attention.triton.launch' not in sys.modules"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_rows_are_aligned_only_if_the_first_one_is() -> None:
    from tilegrad.kernels.attention.triton.arguments import alignment

    memory = torch.empty(2 * 3 * 8 * 64 + 64, dtype=torch.float16)
    aligned, shifted = (memory[n : n + 2 * 3 * 8 * 64].view(2, 3, 8, 64) for n in (0, 1))
    assert alignment(aligned, varlen=False) == alignment(aligned[..., :63], varlen=False) == 8
    assert alignment(aligned, shifted, varlen=False) == 1
    assert alignment(torch.empty(2, 3, 8, 63, dtype=torch.float16), varlen=False) == 1


def test_an_unknown_architecture_has_the_tiles_of_the_nearest_lower_one() -> None:
    row = tiles.TABLE[90, 16, 128, True]
    assert tiles.candidates("dq", (103, 16, 128, True))[0] == row.dq
    assert tiles.candidates("dq", (121, 16, 128, True))[0] == tiles.TABLE[120, 16, 128, False].dq
    assert tiles.candidates("dq", (75, 16, 64, False))[0] == tiles.TABLE[80, 16, 64, False].dq
    first, *others = tiles.candidates("fwd", (90, 16, 128, True))
    assert first == row.fwd and others
    assert all(tile.m <= first.m and tile.n <= first.n for tile in others)


def test_specifications_cover_every_allowed_pair_of_features() -> None:
    chosen = specs()
    assert len(chosen) <= 50 and all(map(allowed, chosen))
    assert set.union(*map(pairs, chosen)) == all_pairs(AXES, allowed)


@interpreted
def test_interpreted_bfloat16_call_may_have_float32_dk_and_dv() -> None:
    x, mask = [randn(1, h, 40, 16, dtype=torch.bfloat16, seed=h) for h in (2, 1)], Mask(causal=True)
    q, k, o, lse = x[0], x[1], torch.empty_like(x[0]), torch.empty(1, 2, 40)
    shapes = [attention_workspace(q, k, k, mask, backward=backward, kernel="triton") for backward in (False, True)]
    attention_fwd(q, k, k, mask, o=o, lse=lse, scratch=new_scratch(shapes[0], "cpu"), kernel="triton")
    grads = {}
    for dtype in (torch.bfloat16, torch.float32):
        out: dict[str, Any] = {name: torch.empty_like(k, dtype=dtype) for name in ("dk", "dv")}
        scratch = new_scratch(shapes[1], "cpu")
        attention_bwd(q, k, k, o, lse, o, None, mask, dq=None, **out, scratch=scratch, kernel="triton")
        grads[dtype] = out
    for name, sums in grads[torch.float32].items():
        assert torch.equal(sums.bfloat16(), grads[torch.bfloat16][name])
        assert not torch.equal(sums.bfloat16().float(), sums)


@interpreted
@pytest.mark.parametrize(("tq", "tk"), [(18, 113), (40, 45)])
def test_interpreted_kernels_do_not_write_after_the_last_row(tq: int, tk: int) -> None:
    """18 rows are two tiles of the kernel that adds the parts of shared columns; 40 rows are not a multiple of any tile."""
    q, k = (randn(1, 1, t, 16, dtype=torch.float32, seed=t) for t in (tq, tk))
    rooms = {"o": torch.full((1, 1, 80, 16), 7.0), "lse": torch.full((1, 1, 80), 7.0)}
    out = {name: room[:, :, :tq] for name, room in rooms.items()}
    shapes = attention_workspace(q, k, k, Mask(), backward=False, kernel="triton")
    assert bool(shapes) == (tq < tk // 4), "shared columns have scratch"
    attention_fwd(q, k, k, Mask(), o=out["o"], lse=out["lse"], scratch=new_scratch(shapes, "cpu"), kernel="triton")
    assert all(torch.equal(room[:, :, tq:], torch.full_like(room[:, :, tq:], 7.0)) for room in rooms.values())
    assert torch.allclose(out["o"], torch.nn.functional.scaled_dot_product_attention(q, k, k), atol=1e-5)


@interpreted
@pytest.mark.parametrize("bias", ["bhqk", "BK"])
def test_interpreted_bias_may_have_several_batches_and_heads(bias: str) -> None:
    check(replace(BASE, b=2, hkv=2, tq=18, tk=20, bias=bias))
