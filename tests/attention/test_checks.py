"""Bad input: every requirement of checks.py raises its own message, and nothing else does."""

from __future__ import annotations

import ast
import inspect
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tilegrad
from tilegrad import functional
from tilegrad.kernels import cache
from tilegrad.kernels.attention import api, checks, table
from tilegrad.kernels.scratch import new_scratch
from tilegrad.kernels.table import Kernel, Table

Q = torch.zeros(2, 4, 6, 8)
K = torch.zeros(2, 2, 5, 8)
P = torch.zeros(6, 4, 8)
ENDS = torch.tensor([0, 2, 6], dtype=torch.int32)


def rows(*shape: int, at: tuple[int, ...] | None = None, is_: int = 0) -> torch.Tensor:
    """Intervals that are empty except for the number at `at`."""
    x = torch.zeros(shape, dtype=torch.int32)
    if at is not None:
        x[at] = is_
    return x


DENSE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": [1]}, TypeError, "q: got list; accepted: a tensor"),
    ({"q": Q.numpy()}, TypeError, "q: got ndarray; accepted: a tensor .torch.from_numpy converts"),
    ({"v": K.numpy()}, TypeError, "v: got ndarray; accepted: a tensor"),
    ({"bias": torch.zeros(6, 5).numpy()}, TypeError, "bias: got ndarray; accepted: None or a tensor .torch.from_numpy"),
    ({"bias": 1.0}, TypeError, "bias: got float; accepted: None or a tensor"),
    ({"sinks": 1.0}, TypeError, "sinks: got float"),
    ({"alibi_slopes": torch.ones(4, requires_grad=True)}, ValueError, "alibi_slopes: got requires_grad=True"),
    ({"causal": 1}, TypeError, "causal: got 1; accepted: True or False"),
    ({"window": 5}, TypeError, "window: got 5; accepted: None, or a pair"),
    ({"window": (1, 2, 3)}, ValueError, "window: got"),
    ({"window": (-1, 0)}, ValueError, "window: got"),
    ({"window": (1.5, 0)}, ValueError, "window: got"),
    ({"scale": "1"}, TypeError, "scale: got '1'"),
    ({"scale": math.nan}, ValueError, "scale: got nan"),
    ({"softcap": None}, TypeError, "softcap: got None"),
    ({"softcap": -1.0}, ValueError, "softcap: got -1.0"),
    ({"softcap": math.inf}, ValueError, "softcap: got inf"),
    ({"dropout_p": "a"}, TypeError, "dropout_p: got 'a'"),
    ({"dropout_p": 1.0}, ValueError, "dropout_p: got 1.0; accepted: a number p, 0 ≤ p < 1"),
    ({"seed": 1.5}, TypeError, "seed: got 1.5"),
    ({"seed": 2**64}, ValueError, "seed: got 18446744073709551616"),
    ({"seed": torch.zeros(1, dtype=torch.int64), "dropout_p": 0.1}, TypeError, r"seed: got torch.int64, shape \(1,\)"),
    ({"q": Q[0]}, ValueError, r"q: got shape \(4, 6, 8\)"),
    ({"k": K[0]}, ValueError, "k: got shape"),
    ({"q": Q.int(), "k": K.int(), "v": K.int()}, TypeError, "q: got torch.int32; accepted: float32"),
    ({"k": K.double()}, TypeError, "k: got torch.float64, and q is torch.float32"),
    ({"v": K.half()}, TypeError, "v: got torch.float16"),
    ({"v": K.to("meta")}, ValueError, "v: got meta, and q is on cpu"),
    ({"bias": torch.zeros(1, device="meta")}, ValueError, "bias: got meta"),
    ({"q": torch.zeros(2, 4, 6, 513)}, ValueError, "q: got shape .* accepted: a head dimension of 1 to 512"),
    ({"q": torch.zeros(2, 4, 6, 0)}, ValueError, "q: got shape"),
    ({"v": torch.zeros(2, 2, 5, 600)}, ValueError, "v: got shape"),
    ({"k": torch.zeros(2, 2, 5, 7), "v": K}, ValueError, "k: got shape .* accepted: q's head dimension"),
    ({"k": K[:1], "v": K[:1]}, ValueError, "k: got shape .* accepted: q's batch size"),
    ({"v": K[:, :, :4]}, ValueError, "v: got shape .* accepted: k's shape"),
    ({"q": torch.zeros(2, 3, 6, 8)}, ValueError, "q: got 3 query heads, 2 kv heads"),
    ({"k": K[:, :0], "v": K[:, :0]}, ValueError, "q: got 4 query heads, 0 kv heads"),
    ({"q": torch.zeros(2, 4, 8, 6).mT}, ValueError, "q: got strides"),
    ({"bias": torch.zeros(6, 5).int()}, TypeError, "bias: got torch.int32"),
    ({"bias": torch.zeros(6, 5).double()}, TypeError, "bias: got torch.float64"),
    ({"bias": torch.zeros(6, 4)}, ValueError, r"bias: got shape \(6, 4\), and \(B, Hq, Tq, Tk\) is \(2, 4, 6, 5\)"),
    ({"bias": torch.zeros(1, 1, 1, 6, 5)}, ValueError, "bias: got shape"),
    ({"alibi_slopes": torch.zeros(4).half()}, TypeError, "alibi_slopes: got torch.float16"),
    ({"alibi_slopes": torch.zeros(2)}, ValueError, r"alibi_slopes: got shape \(2,\), and B = 2, Hq = 4"),
    ({"sinks": torch.zeros(4).double()}, TypeError, "sinks: got torch.float64"),
    ({"sinks": torch.zeros(2)}, ValueError, r"sinks: got shape \(2,\), and Hq = 4"),
    ({"intervals": [0, 1]}, TypeError, "intervals: got list"),
    ({"intervals": torch.zeros(1, 1, 5, 2)}, TypeError, "intervals: got torch.float32; accepted: int32"),
    ({"intervals": torch.zeros(1, 1, 5, 2).long()}, TypeError, r"torch.int64; .*call .to\(torch.int32\)"),
    ({"intervals": rows(1, 1, 6, 2)}, ValueError, r"\(1, 1, 6, 2\) for B = 2, Hkv = 2, Tk = 5; accepted"),
    ({"intervals": rows(1, 1, 5, 3)}, ValueError, r"intervals: got shape \(1, 1, 5, 3\)"),
    ({"intervals": rows(1, 4, 5, 2)}, ValueError, "intervals: .* accepted: int32, .B or 1, Hkv or 1, Tk, 2 or 4"),
    ({"intervals": rows(3, 1, 5, 2)}, ValueError, "intervals: got shape"),
    ({"intervals": rows(1, 5, 2)}, ValueError, "intervals: got shape"),
    ({"intervals": rows(1, 1, 5, 4)[..., ::2]}, ValueError, r"intervals: got strides .*call .contiguous\(\)"),
    ({"intervals": rows(1, 1, 5, 2).to("meta")}, ValueError, "intervals: got meta, and q is on cpu"),
    (
        {"intervals": rows(2, 1, 5, 4, at=(1, 0, 3, 3), is_=7)},
        ValueError,
        r"intervals: got \[0, 7\) in \[1, 0, 3, 2 : 4\]; accepted: 0 ≤ start ≤ end ≤ 6, the rows of q",
    ),
    (
        {"intervals": rows(1, 2, 5, 2, at=(0, 1, 4, 0), is_=1)},
        ValueError,
        r"got \[1, 0\) in \[0, 1, 4, 0 : 2\]",
    ),
    (
        {"intervals": rows(1, 1, 5, 2, at=(0, 0, 0, 0), is_=-1)},
        ValueError,
        r"got \[-1, 0\) in \[0, 0, 0, 0 : 2\]",
    ),
]

PACKED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"cu_seqlens_q": None}, ValueError, "q: got shape"),
    ({"cu_seqlens_q": [0, 6]}, TypeError, "cu_seqlens_q: got list"),
    ({"cu_seqlens_q": ENDS.numpy()}, TypeError, "cu_seqlens_q: got ndarray; accepted: None or a tensor"),
    ({"cu_seqlens_q": ENDS.long()}, ValueError, "cu_seqlens_q: got torch.int64"),
    ({"cu_seqlens_k": ENDS[None]}, ValueError, r"cu_seqlens_k: got torch.int32, shape \(1, 3\)"),
    ({"cu_seqlens_k": None}, ValueError, "cu_seqlens_k: got None; accepted: a tensor if cu_seqlens_q is one"),
    ({"cu_seqlens_k": ENDS[1:]}, ValueError, "cu_seqlens_k: got shape .* accepted: as many entries"),
    ({"max_seqlen_q": 2.0}, ValueError, "max_seqlen_q: got 2.0"),
    ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k: got -1"),
    ({"max_seqlen_q": 3}, ValueError, "max_seqlen_q: got 3; accepted: at least 4, the length of sequence 1"),
    ({"cu_seqlens_q": torch.tensor([0, 7, 6], dtype=torch.int32)}, ValueError, "cu_seqlens_q: got 7 at index 1, then 6"),
    ({"cu_seqlens_q": torch.arange(0, 9, dtype=torch.int32)[::3]}, ValueError, "accepted: contiguous int32 cumulative"),
    ({"cu_seqlens_k": torch.tensor([0, 2, 5], dtype=torch.int32)}, ValueError, "got 0 … 5; accepted: 0 … 6"),
    ({"cu_seqlens_k": torch.tensor([1, 2, 6], dtype=torch.int32)}, ValueError, "cu_seqlens_k: got 1 … 6"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), DENSE, ids=[m for _, _, m in DENSE])
def test_a_bad_argument_of_attention_is_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"q": Q, "k": K, "v": K} | change
    with pytest.raises(error, match=message):
        tilegrad.attention(**arguments)


@pytest.mark.parametrize(("change", "error", "message"), PACKED, ids=[m for _, _, m in PACKED])
def test_a_bad_argument_of_attention_varlen_is_named(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {
        "q": P,
        "k": P,
        "v": P,
        "cu_seqlens_q": ENDS,
        "cu_seqlens_k": ENDS,
        "max_seqlen_q": 4,
        "max_seqlen_k": 4,
    }
    with pytest.raises(error, match=message):
        tilegrad.attention_varlen(**(arguments | change))


DENSE_OPTIONS = {
    name for name, x in inspect.signature(tilegrad.attention).parameters.items() if x.kind is x.KEYWORD_ONLY
}
TORCHS, FLASHS = "tilegrad.sdpa, which takes torch's names", "tilegrad.flash, which takes flash-attn's names"
UNKNOWN: list[tuple[str, Any, str]] = [
    ("is_causal", True, f"is_causal: got True; accepted: causal= here, or {TORCHS}"),
    ("attn_mask", None, f"attn_mask: got None; accepted: bias= here, or {TORCHS}"),
    ("attn_mask", Q, f"attn_mask: got a Tensor; accepted: bias= here, or {TORCHS}"),
    (
        "enable_gqa",
        True,
        f"enable_gqa: got True; accepted: nothing: GQA needs no flag here, or {TORCHS}",
    ),
    ("softmax_scale", 0.5, f"softmax_scale: got 0.5; accepted: scale= here, or {FLASHS}"),
    ("window_size", (1, 0), rf"window_size: got \(1, 0\); accepted: window= here, or {FLASHS}"),
    ("sm_scale", 1.0, "sm_scale: got 1.0; accepted: scale= here$"),
    ("casual", True, r"casual: got True; accepted: causal=\? Or any of causal, window, scale"),
    ("xyz", 1, "xyz: got 1; accepted: causal, window, scale, softcap, bias"),
    ("interval", 1, r"interval: got 1; accepted: intervals=\? Or any of causal"),
]


@pytest.mark.parametrize(("name", "value", "message"), UNKNOWN, ids=[name for name, _, _ in UNKNOWN])
def test_the_error_for_an_option_of_another_library_names_ours(name: str, value: Any, message: str) -> None:
    calls: list[Any] = [tilegrad.attention, tilegrad.explain]
    for call in calls:
        with pytest.raises(TypeError, match=message):
            call(Q, K, K, **{name: value})


def test_names_of_other_libraries_lead_to_options_that_exist() -> None:
    assert {ours for ours, _ in functional._ELSEWHERE.values()} <= DENSE_OPTIONS
    assert not functional._ELSEWHERE.keys() & DENSE_OPTIONS
    for name, message in (
        ("is_causal", "accepted: causal= here"),
        ("intervals", "accepted: None for packed sequences; tilegrad.masks.documents"),
        ("attn_mask", "accepted: causal, window, scale, softcap, a"),
    ):
        with pytest.raises(TypeError, match=f"{name}: got True; {message}"):
            tilegrad.attention_varlen(P, P, P, ENDS, ENDS, 4, 4, **{name: True})  # type: ignore[call-overload]


def test_a_kernel_for_gpus_says_what_runs_on_a_machine_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for kernel in ("triton", "hopper"):
        with pytest.raises(ValueError, match=f"kernel: got '{kernel}', which .* needs a .*; accepted: '.*', or None"):
            tilegrad.attention(Q, K, K, kernel=kernel)


PACKED_CALL = {"q": P, "k": P, "v": P, "cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS, "max_seqlen_q": 4, "max_seqlen_k": 4}
META = torch.zeros(8, device="meta")
MORE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"k": [1]}, {}),
    ({"v": [1]}, {}),
    ({"alibi_slopes": 1.0}, {}),
    ({"dropout_p": 0.1}, {}),
    ({"v": K[0]}, {}),
    ({"k": K.to("meta")}, {}),
    ({"sinks": META}, {}),
    ({"alibi_slopes": META}, {}),
    ({"seed": META}, {}),
    ({"k": torch.zeros(2, 2, 5, 600)}, {}),
    ({"k": K.mT.contiguous().mT}, {}),
    ({"v": K.mT.contiguous().mT}, {}),
    ({"bias": torch.zeros(1)}, PACKED_CALL),
    ({"intervals": rows(1, 1, 6, 2)}, PACKED_CALL),
    ({"cu_seqlens_k": 1}, PACKED_CALL),
    ({"max_seqlen_k": None}, PACKED_CALL),
    ({"cu_seqlens_q": ENDS.to("meta")}, PACKED_CALL),
    ({"cu_seqlens_k": ENDS.to("meta")}, PACKED_CALL),
]


def test_a_handle_has_a_shape_a_dtype_and_a_device() -> None:
    whole = {"shape": (2, 4, 6, 8), "dtype": torch.float32, "device": torch.device("cpu")}
    assert checks._is_tensor(Q) and checks._is_tensor(SimpleNamespace(**whole))
    for name in whole:
        assert not checks._is_tensor(SimpleNamespace(**{key: value for key, value in whole.items() if key != name}))


def test_every_requirement_has_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """A requirement is a `require(…)` of the source and its argument. A requirement that no case fails is dead code."""
    made: set[tuple[int, str]] = set()
    failed: set[tuple[int, str]] = set()
    require = checks.require

    def recorded(ok: bool, name: str, *rest: Any, **options: Any) -> None:
        requirement = sys._getframe(1).f_lineno, name
        made.add(requirement)
        if not ok:
            failed.add(requirement)
        require(ok, name, *rest, **options)

    monkeypatch.setattr(checks, "require", recorded)
    for change, base in [*((c, {}) for c, _, _ in DENSE), *((c, PACKED_CALL) for c, _, _ in PACKED), *MORE]:
        values: dict[str, Any] = {"q": Q, "k": K, "v": K} | base | change
        q, k, v = (values.pop(x) for x in ("q", "k", "v"))
        mask = tilegrad.Mask(**values)
        try:
            checks.check_options(q, k, v, mask)
            checks.check_tensors(q, k, v, mask)
        except (TypeError, ValueError):
            continue
    calls = (node for node in ast.walk(ast.parse(inspect.getsource(checks))) if isinstance(node, ast.Call))
    lines = {node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id == "require"}
    assert lines == {line for line, _ in made} and len(lines) > 30
    never_failed = sorted(made - failed)
    assert not never_failed


def test_a_wrong_output_or_scratch_is_named_in_the_error() -> None:
    q, mask = Q, tilegrad.Mask()
    o, lse = torch.empty(2, 4, 6, 8), torch.empty(2, 4, 6)
    shapes = tilegrad.attention_workspace(q, K, K, mask, backward=False, kernel="tiled")
    scratch = new_scratch(shapes, "cpu")
    with pytest.raises(ValueError, match=r"o: got torch.float32 \(2, 4, 6\)"):
        tilegrad.attention_fwd(q, K, K, mask, o=lse, lse=lse, scratch=scratch)
    with pytest.raises(ValueError, match=r"lse: got torch\.float64"):
        tilegrad.attention_fwd(q, K, K, mask, o=o, lse=lse.double(), scratch=scratch)
    with pytest.raises(ValueError, match=r"scratch: attention got no 'tiled.q'; accepted: .*attention_workspace"):
        tilegrad.attention_fwd(q, K, K, mask, o=o, lse=lse, kernel="tiled")
    for wrong in (lse[:1, :1], torch.empty_like(scratch["tiled.s"], dtype=torch.float64), Q.mT):
        with pytest.raises(ValueError, match=r"scratch\['tiled.s'\]: attention got"):
            tilegrad.attention_fwd(q, K, K, mask, o=o, lse=lse, scratch=scratch | {"tiled.s": wrong}, kernel="tiled")
    with pytest.raises(
        ValueError, match="dbias: got a tensor; accepted: None, because this call has no bias with a gradient"
    ):
        tilegrad.attention_bwd(q, K, K, o, lse, o, None, mask, dq=None, dk=None, dv=None, dbias=o)
    with pytest.raises(ValueError, match="do: got"):
        tilegrad.attention_bwd(q, K, K, o, lse, lse, None, mask, dq=None, dk=None, dv=None)


def test_lengths_on_a_device_are_read_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = tilegrad.Mask(cu_seqlens_q=ENDS.to("meta"), cu_seqlens_k=ENDS.to("meta"), max_seqlen_q=1, max_seqlen_k=1)
    q = P.to("meta")
    checks.check_values(q, q, mask)
    monkeypatch.setenv("TILEGRAD_CHECK", "1")
    with pytest.raises(NotImplementedError):
        checks.check_values(q, q, mask)


def forward(q: torch.Tensor, mask: tilegrad.Mask, kernel: str | None = None) -> None:
    tilegrad.attention_fwd(q, K, K, mask, o=torch.empty_like(q), lse=None, kernel=kernel, scratch=SCRATCH)


SCRATCH = {
    name: buffer
    for kernel in (None, "tiled")
    for name, buffer in new_scratch(
        tilegrad.attention_workspace(Q, K, K, tilegrad.Mask(), backward=False, kernel=kernel), "cpu"
    ).items()
}


def test_a_signature_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    monkeypatch.setattr(api, "check_tensors", lambda *call: checked.append(call))
    monkeypatch.setattr(api, "prepared_calls", {})
    for _ in range(3):
        forward(torch.zeros(2, 4, 6, 8), tilegrad.Mask(causal=True))
    assert len(checked) == 1
    forward(torch.zeros(2, 4, 6, 9)[..., :8], tilegrad.Mask(causal=True))
    forward(Q, tilegrad.Mask(causal=True, scale=0.5))
    forward(Q, tilegrad.Mask(causal=True), kernel="tiled")
    assert len(checked) == 4


def test_a_cached_signature_does_not_skip_the_checks_of_a_wrong_call() -> None:
    right: dict[str, Any] = {"causal": True, "scale": 1.0, "window": (1, 0)}
    for _ in range(2):
        forward(Q, tilegrad.Mask(**right))
    bad: list[dict[str, Any]] = [
        {"causal": 1}, {"scale": True}, {"window": (True, 0)}, {"seed": 1.5}, {"softcap": "0"}, {"window": [1, [0]]},
    ]  # fmt: skip
    for change in bad:
        with pytest.raises((TypeError, ValueError), match=next(iter(change))):
            forward(Q, tilegrad.Mask(**(right | change)))
    with pytest.raises(ValueError, match="q: got strides"):
        forward(torch.zeros(2, 4, 8, 6).mT, tilegrad.Mask(causal=True, scale=1.0, window=(1, 0)))


def test_after_a_change_of_the_table_the_kernel_is_selected_again(monkeypatch: pytest.MonkeyPatch) -> None:
    forward(Q, tilegrad.Mask())
    nothing = Kernel("nothing", "attention.tiled", lambda _problem: "takes nothing")
    monkeypatch.setattr(table, "ATTENTION", Table("attention", (nothing,)))
    with pytest.raises(ValueError, match="a call that no kernel takes"):
        forward(Q, tilegrad.Mask())


def test_the_cache_of_signatures_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "prepared_calls", {})
    monkeypatch.setattr(cache, "MOST_ENTRIES", 2)
    for scale in (0.1, 0.2, 0.3):
        forward(Q, tilegrad.Mask(scale=scale))
    assert len(api.prepared_calls) == 1
