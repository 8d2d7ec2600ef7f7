"""The forward of an invariant problem in Triton is close to the oracle and has the bits of attention over a cache.

Without a GPU Triton interprets, in the process that test_triton.py starts. test_train_equals_generate.py has whole models on
a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.cases import Call, check_call
from support.compiler import SHARED_MEMORY_BYTES, compiling, slowly
from support.interpreter import interpreted
from support.ops import poisoned, randn
from torch import Tensor

from tilegrad.kernels.attention import Mask, attention_fwd, attention_workspace
from tilegrad.kernels.attention.problem import Forward, Problem
from tilegrad.kernels.attention.table import ATTENTION
from tilegrad.kernels.cache_attention import cache_attention_fwd, cache_attention_workspace
from tilegrad.kernels.scratch import Form

pytest.importorskip("triton", reason="needs Triton")
Options = dict[str, Any]
CASES: dict[str, tuple[torch.dtype, int, int, int, Options]] = {  # dtype, Hq, Hkv, D, options
    "short window": (torch.bfloat16, 2, 1, 16, {"window": (17, None)}),
    "every option": (  # row 128 has columns in three splits, and its window begins inside a tile
        torch.float32, 1, 1, 20,
        {"softcap": 2.0, "sinks": True, "alibi_slopes": True, "window": (77, None), "scale": -0.3},
    ),
    "wide head": (torch.bfloat16, 2, 1, 264, {}),
}  # fmt: skip
ROWS = (0, 63, 64, 128, 149)  # decoded rows of the dense sequence
PACKED, PACKED_ROWS = (3, 65, 82), (2, 3, 67, 68, 149)  # lengths of packed sequences, and their decoded rows


def mask_of(hq: int, options: Options, device: str) -> Mask:
    names = [n for n in options if n in ("sinks", "alibi_slopes")]
    return Mask(causal=True, **{**options, **{n: (randn(hq, dtype=torch.float32).abs() / 8).to(device) for n in names}})


def scratch_of(shapes: Any, device: torch.device) -> dict[str, Tensor]:
    return {name: x.to(device) for name, x in poisoned(shapes).items()}


def trained(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, invariant: bool = True) -> tuple[Tensor, Tensor]:
    shape = (q.shape[1], q.shape[0]) if mask.varlen else q.shape[:-1]
    o, lse = torch.full_like(q, torch.nan), torch.empty(shape, device=q.device)
    how: Any = {"kernel": "triton", "invariant": invariant}
    scratch = scratch_of(attention_workspace(q, k, v, mask, backward=False, **how), q.device)
    attention_fwd(q, k, v, mask, o=o, lse=lse, scratch=scratch, **how)
    return o, lse


def decoded(q: Tensor, k: Tensor, v: Tensor, mask: Mask, rows: list[int], starts: list[int]) -> Tensor:
    """Decodes rows of packed q, k, v (total, H, D) as the tokens of a batch, each after the earlier ones of its sequence."""
    (t, hkv, d), hq, many = k.shape, q.shape[1], len(rows)
    first = [max(start for start in starts if start <= n) for n in rows]
    caches = k.new_full((2, many, hkv, t, d), torch.nan)
    for b, (n, start) in enumerate(zip(rows, first, strict=True)):
        for cache, x in zip(caches, (k, v), strict=True):
            cache[b, :, : n - start] = x[start:n].transpose(0, 1)
    positions = (torch.tensor(rows) - torch.tensor(first)).to(q.device)
    new_q, new_k, new_v = (x[rows].reshape(many, -1) for x in (q, k, v))
    shapes = cache_attention_workspace(many, hq, hkv, d, t, mask, q.dtype, q.device, kernel="triton")
    o = torch.empty_like(new_q)
    writes: Any = {"o": o, "k_cache": caches[0], "v_cache": caches[1], "scratch": scratch_of(shapes, q.device)}
    cache_attention_fwd(new_q, new_k, new_v, positions, mask, hq, hkv, **writes, kernel="triton")
    return o.view(many, hq, d)


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of float32 are float32: float64 sums, rounded to float32, would hide a different order."""
    from tilegrad.kernels.attention.triton import fit, launch
    from tilegrad.kernels.cache_attention import triton_ops

    for module in (launch, triton_ops):
        monkeypatch.setattr(module, "SPLIT", 64)
    monkeypatch.setattr(fit, "FAST_FLOAT64", ())


@interpreted
@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize("name", ["short window", "every option", slowly("wide head")])
def test_interpreted_a_decoded_row_has_the_bits_of_the_training_row(name: str) -> None:
    dtype, hq, hkv, d, options = CASES[name]
    mask, t = mask_of(hq, options, "cpu"), sum(PACKED)
    q, k, v = (randn(t, h, d, dtype=dtype, seed=h + n) for n, h in enumerate((hq, hkv, hkv)))
    one_q, one_k, one_v = (x.transpose(0, 1)[None] for x in (q, k, v))
    dense, lse = trained(one_q, one_k, one_v, mask)
    check_call(Call(one_q, one_k, one_v, torch.ones_like(one_q), None, mask), {"o": dense, "lse": lse})
    assert torch.equal(decoded(q, k, v, mask, list(ROWS), [0]), dense[0].transpose(0, 1)[list(ROWS)])
    ends, longest = torch.tensor([0, *PACKED]).cumsum(0).int(), max(PACKED)
    packing: Any = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
    packed, _ = trained(q, k, v, replace(mask, **packing))
    assert torch.equal(decoded(q, k, v, mask, list(PACKED_ROWS), ends[:-1].tolist()), packed[list(PACKED_ROWS)])


@interpreted
@pytest.mark.usefixtures("short_splits")
def test_interpreted_dropout_bias_and_empty_rows_agree_with_the_oracle() -> None:
    """They agree by the closeness rule."""
    q, k = randn(1, 1, 90, 16, dtype=torch.float32), randn(1, 1, 70, 16, dtype=torch.float32, seed=1)
    bias = randn(90, 70, dtype=torch.float32)
    for mask in (Mask(causal=True, dropout_p=0.3, seed=5), Mask(bias=bias), Mask(causal=True, window=(7, None))):
        o, lse = trained(q, k, k, mask)
        check_call(Call(q, k, k, torch.ones_like(q), None, mask), {"o": o, "lse": lse})


@interpreted
@pytest.mark.usefixtures("short_splits")
def test_interpreted_bits_differ_without_invariant() -> None:
    """This shows that the test of equal bits can fail."""
    x = randn(1, 1, 100, 16, dtype=torch.float32)
    assert not torch.equal(*(trained(x, x, x, Mask(causal=True), invariant=n)[0] for n in (False, True)))


ON_A_DEVICE: dict[str, tuple[int, int, int, Options]] = {  # Hq, Hkv, D, options
    "gpt2": (12, 12, 64, {}),
    "llama": (8, 2, 128, {}),
    "mistral": (8, 2, 64, {"window": (299, None)}),
    "padded": (3, 1, 40, {"scale": -0.1}),
    "not aligned": (2, 1, 18, {}),
    "gemma": (4, 1, 256, {"softcap": 30.0, "window": (100, None)}),
    "every option": (4, 4, 64, {"softcap": 2.0, "sinks": True, "alibi_slopes": True, "window": (300, None)}),
    "sinks": (20, 1, 64, {"sinks": True}),
    "widest": (4, 1, 512, {}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ON_A_DEVICE)
def test_decoded_rows_on_a_device_have_the_bits_of_training(name: str, dtype: torch.dtype) -> None:
    """Every row of a sequence of 700 tokens in 3 splits: as one sequence, packed, and in batches of 700 and 3."""
    hq, hkv, d, options = ON_A_DEVICE[name]
    mask, t = mask_of(hq, options, "cuda"), 700
    q, k, v = (randn(t, h, d, dtype=dtype, seed=h + n).cuda() for n, h in enumerate((hq, hkv, hkv)))
    one_q, one_k, one_v = (x.transpose(0, 1)[None] for x in (q, k, v))
    dense, lse = trained(one_q, one_k, one_v, mask)
    usual, usual_lse = trained(one_q, one_k, one_v, mask, invariant=False)
    torch.testing.assert_close(dense, usual, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, usual_lse, rtol=1e-5, atol=1e-4)
    rows = dense[0].transpose(0, 1)
    for some in (list(range(t)), [0, 255, 699], [256]):
        got = decoded(q, k, v, mask, some, [0])
        assert int((got != rows[some]).sum()) == 0, f"{name}: a batch of {len(some)}"
    ends = torch.tensor([0, 70, 71, t], dtype=torch.int32, device="cuda")
    packing: Any = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 629, "max_seqlen_k": 629}
    packed, _ = trained(q, k, v, replace(mask, **packing))
    assert int((decoded(q, k, v, mask, list(range(t)), ends[:-1].tolist()) != packed).sum()) == 0


@contextmanager
def kept(architecture: int, folder: Path) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """After the block it has the resources and Triton's code with layouts of each kernel."""
    from triton.runtime.jit import JITFunction

    from tilegrad.kernels.attention.triton import fit

    code: dict[str, str] = {}
    with (
        mock.patch.object(fit, "architecture", return_value=architecture),
        mock.patch.object(fit, "shared_memory_bytes", return_value=SHARED_MEMORY_BYTES[architecture]),
        mock.patch.object(fit, "fits", {}),
        compiling(architecture, folder) as found,
    ):
        compile_only = JITFunction.run

        def keep(self: Any, *args: Any, **options: Any) -> Any:
            compiled = compile_only(self, *args, **options)
            code[self.__name__] = compiled.asm["ttgir"]
            return compiled

        with mock.patch.object(JITFunction, "run", keep):
            yield found, code


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiles for GPUs that are not there")
@pytest.mark.parametrize("architecture", [slowly(80), 90])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gpt2", torch.bfloat16),
        slowly(("llama", torch.bfloat16)),
        slowly(("gemma", torch.bfloat16)),
        slowly(("every option", torch.bfloat16)),
        slowly(("not aligned", torch.bfloat16)),
        ("llama", torch.float32),
        slowly(("gpt2", torch.float32)),
        slowly(("gemma", torch.float32)),
    ],
)
def test_training_and_decoding_kernels_add_in_the_same_order(
    architecture: int, name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """They have the same MMA instructions and the same layouts for row reductions. On sm_90 nothing spills."""
    from tilegrad.kernels.attention.triton import launch
    from tilegrad.kernels.cache_attention import Caches, triton_ops

    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        pytest.skip("float32 is rounded to tf32")
    hq, hkv, d, options = ON_A_DEVICE[name]
    mask, t = mask_of(hq, options, "cpu"), 700
    x = torch.empty(2, t, hq + 2 * hkv, d, dtype=dtype).transpose(1, 2)
    q, k, v = x.split([hq, hkv, hkv], 1)
    o, cache = torch.empty(2, t, hq, d, dtype=dtype).transpose(1, 2), torch.empty(2, hkv, t, d, dtype=dtype)
    with kept(architecture, tmp_path) as (found, code):
        for call in launch._forward(Forward(q, k, v, mask, o, torch.empty(2, hq, t), (), invariant=True), {}):
            call.run()
        scratch = poisoned(triton_ops.workspace(cache, hq))
        one = q[:, :, 0], k[:, :, 0], v[:, :, 0], torch.zeros(2, dtype=torch.int64), mask
        triton_ops.fwd(*one, o=o[:, :, 0], caches=Caches(cache, cache), scratch=scratch)
    both = "_attention_fwd_kernel", "_attend_kernel"
    assert found.keys() == {*both, "_merge_kernel"}
    mma, reduced = (
        [set(re.findall(pattern, text, re.MULTILINE)) for text in texts]
        for pattern, texts in (
            (r"\b(?:HGMMA\.64x\d+x16|HMMA|DMMA)\.[\w.]+", [found[kernel].sass for kernel in both]),
            (r"^#mma\d* = .*|(?<=\}\) : )\(tensor<\S+ #mma\d*>\) -> \S+", [code[kernel] for kernel in both]),
        )
    )
    assert mma[0] == mma[1] != set() and reduced[0] == reduced[1] and len(reduced[0]) > 1
    wide = dtype == torch.bfloat16 and architecture == 90 and d % 8 == 0
    assert all("HGMMA" in each for each in mma[0]) == wide
    for kernel in found.values():
        assert kernel.shared_bytes <= SHARED_MEMORY_BYTES[architecture]
        assert architecture != 90 or kernel.spilled_bytes == 0, kernel.kernel


def test_only_triton_takes_an_invariant_problem_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilegrad.kernels import gpu

    monkeypatch.setattr(gpu, "capability", lambda _device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    x: Any = Form((4, 4, 256, 64), torch.bfloat16, torch.device("cuda:7"))
    for invariant, kernel in ((False, "hopper"), (True, "triton")):
        found = ATTENTION.explain(Problem(x, x, x, Mask(causal=True), invariant=invariant))
        assert found.kernel == ("triton" if gpu.interpreting() else kernel), found
        for name in ("tiled", "reference"):
            assert ("another order" in found.reasons[name]) == invariant
    gpu._refusal.cache_clear()
