"""Bad input: every row of the table of checks raises its own message, and nothing else does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tilegrad
from tilegrad.kernels.attention import api as contract
from tilegrad.kernels.attention import checks, table
from tilegrad.kernels.table import Kernel, Table

Q = torch.zeros(2, 4, 6, 8)
K = torch.zeros(2, 2, 5, 8)
P = torch.zeros(6, 4, 8)
ENDS = torch.tensor([0, 2, 6], dtype=torch.int32)

DENSE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": [1]}, TypeError, "q: got list; accepted: a tensor"),
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
    ({"q": torch.zeros(2, 4, 6, 257)}, ValueError, "q: got shape .* accepted: a head dimension of 1 to 256"),
    ({"q": torch.zeros(2, 4, 6, 0)}, ValueError, "q: got shape"),
    ({"v": torch.zeros(2, 2, 5, 300)}, ValueError, "v: got shape"),
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
]

PACKED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"cu_seqlens_q": None}, ValueError, "q: got shape"),
    ({"cu_seqlens_q": [0, 6]}, TypeError, "cu_seqlens_q: got list"),
    ({"cu_seqlens_q": ENDS.long()}, ValueError, "cu_seqlens_q: got torch.int64"),
    ({"cu_seqlens_k": ENDS[None]}, ValueError, r"cu_seqlens_k: got torch.int32, shape \(1, 3\)"),
    ({"cu_seqlens_k": None}, ValueError, "cu_seqlens_k: got None; accepted: given exactly where cu_seqlens_q is"),
    ({"cu_seqlens_k": ENDS[1:]}, ValueError, "cu_seqlens_k: got shape .* accepted: as many entries"),
    ({"max_seqlen_q": 2.0}, ValueError, "max_seqlen_q: got 2.0"),
    ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k: got -1"),
    ({"max_seqlen_q": 3}, ValueError, "max_seqlen_q: got 3; accepted: at least 4, the length of sequence 1"),
    ({"cu_seqlens_q": torch.tensor([0, 7, 6], dtype=torch.int32)}, ValueError, "cu_seqlens_q: got 7 and then 6, at 1"),
    ({"cu_seqlens_q": torch.arange(0, 9, dtype=torch.int32)[::3]}, ValueError, "accepted: contiguous int32 cumulative"),
    ({"cu_seqlens_k": torch.tensor([0, 2, 5], dtype=torch.int32)}, ValueError, "got 0 … 5; accepted: .* ends at 6"),
    ({"cu_seqlens_k": torch.tensor([1, 2, 6], dtype=torch.int32)}, ValueError, "cu_seqlens_k: got 1 … 6"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), DENSE, ids=[m for _, _, m in DENSE])
def test_dense(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"q": Q, "k": K, "v": K} | change
    with pytest.raises(error, match=message):
        tilegrad.attention(**arguments)


@pytest.mark.parametrize(("change", "error", "message"), PACKED, ids=[m for _, _, m in PACKED])
def test_packed(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {
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


def test_every_row_of_the_table_has_its_case() -> None:
    """Each row fails for some case above: a row that nothing trips is dead."""
    tripped: set[int] = set()
    rows = (*checks.OPTIONS, *checks.TENSORS)
    packed = {"q": P, "k": P, "v": P, "cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS, "max_seqlen_q": 4, "max_seqlen_k": 4}
    bare = [({"dropout_p": 0.1}, {}), ({"bias": torch.zeros(1)}, packed), ({"sinks": Q[0, 0, 0].to("meta")}, {})]
    bare += [({"alibi_slopes": Q[0, 0, 0].to("meta")}, {}), ({"seed": torch.zeros((), device="meta")}, {})]
    bare += [({"cu_seqlens_q": ENDS.to("meta")}, packed), ({"cu_seqlens_k": ENDS.to("meta")}, packed)]
    bare += [
        ({"k": [1]}, {}),
        ({"v": [1]}, {}),
        ({"v": K[0]}, {}),
        ({"k": K.to("meta")}, {}),
        ({"cu_seqlens_k": 1}, packed),
    ]
    bare += [
        ({"k": torch.zeros(2, 2, 5, 300)}, {}),
        ({"k": K.mT.contiguous().mT}, {}),
        ({"v": K.mT.contiguous().mT}, {}),
    ]
    bare += [({"alibi_slopes": 1.0}, {}), ({"max_seqlen_k": None}, packed)]
    for change, base in [*((c, {}) for c, _, _ in DENSE), *((c, packed) for c, _, _ in PACKED), *bare]:
        values: dict[str, Any] = {"q": Q, "k": K, "v": K} | base | change
        q, k, v = (values.pop(x) for x in ("q", "k", "v"))
        inputs = checks.Inputs(q, k, v, tilegrad.Mask(**values))
        for index, row in enumerate(rows):
            if not row.holds(inputs):
                tripped.add(index)
                break
    assert not [rows[i] for i in set(range(len(rows))) - tripped]


def test_contracts_name_a_wrong_output_or_scratch() -> None:
    q, mask = Q, tilegrad.Mask()
    o, lse = torch.empty(2, 4, 6, 8), torch.empty(2, 4, 6)
    shapes = tilegrad.attention_workspace(q, K, K, mask, backward=False, kernel="tiled")
    scratch = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    with pytest.raises(ValueError, match=r"o: got torch.float32 \(2, 4, 6\)"):
        tilegrad.attention_fwd(q, K, K, mask, o=lse, lse=lse, scratch=scratch)
    with pytest.raises(ValueError, match=r"lse: got torch\.float64"):
        tilegrad.attention_fwd(q, K, K, mask, o=o, lse=lse.double(), scratch=scratch)
    with pytest.raises(ValueError, match="scratch: got no 'q'; accepted: every buffer that attention_workspace"):
        tilegrad.attention_fwd(q, K, K, mask, o=o, lse=lse, kernel="tiled")
    with pytest.raises(ValueError, match=r"scratch\['s'\]: got"):
        tilegrad.attention_fwd(q, K, K, mask, o=o, lse=lse, scratch=scratch | {"s": o}, kernel="tiled")
    with pytest.raises(
        ValueError, match="dbias: got a tensor; accepted: None, for this call has no bias with a gradient"
    ):
        tilegrad.attention_bwd(q, K, K, o, lse, o, None, mask, dq=None, dk=None, dv=None, dbias=o)
    with pytest.raises(ValueError, match="do: got"):
        tilegrad.attention_bwd(q, K, K, o, lse, lse, None, mask, dq=None, dk=None, dv=None)


def test_values_of_lengths_are_read_on_a_device_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = tilegrad.Mask(cu_seqlens_q=ENDS.to("meta"), cu_seqlens_k=ENDS.to("meta"), max_seqlen_q=1, max_seqlen_k=1)
    q = P.to("meta")
    checks.check_lengths(q, q, mask)
    monkeypatch.setenv("TILEGRAD_CHECK", "1")
    with pytest.raises(NotImplementedError):
        checks.check_lengths(q, q, mask)


def forward(q: torch.Tensor, mask: tilegrad.Mask, kernel: str | None = None) -> None:
    tilegrad.attention_fwd(q, K, K, mask, o=torch.empty_like(q), lse=None, kernel=kernel, scratch=SCRATCH)


SCRATCH = {
    name: torch.empty(shape, dtype=dtype)
    for kernel in (None, "tiled")
    for name, (shape, dtype) in tilegrad.attention_workspace(
        Q, K, K, tilegrad.Mask(), backward=False, kernel=kernel
    ).items()
}


def test_a_form_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    monkeypatch.setattr(contract, "check_tensors", lambda *call: checked.append(call))
    monkeypatch.setattr(contract, "_plans", {})
    for _ in range(3):
        forward(torch.zeros(2, 4, 6, 8), tilegrad.Mask(causal=True))
    assert len(checked) == 1
    forward(torch.zeros(2, 4, 6, 9)[..., :8], tilegrad.Mask(causal=True))
    forward(Q, tilegrad.Mask(causal=True, scale=0.5))
    forward(Q, tilegrad.Mask(causal=True), kernel="tiled")
    assert len(checked) == 4


def test_a_remembered_form_lets_nothing_wrong_through() -> None:
    for _ in range(2):
        forward(Q, tilegrad.Mask(causal=True, scale=1.0, window=(1, 0)))
    bad = [{"causal": 1}, {"scale": True}, {"window": (True, 0)}, {"seed": 1.5}, {"softcap": "0"}, {"window": [1, [0]]}]
    for change in bad:
        with pytest.raises((TypeError, ValueError), match=next(iter(change))):
            forward(Q, tilegrad.Mask(**({"causal": True, "scale": 1.0, "window": (1, 0)} | change)))
    with pytest.raises(ValueError, match="q: got strides"):
        forward(torch.zeros(2, 4, 8, 6).mT, tilegrad.Mask(causal=True, scale=1.0, window=(1, 0)))


def test_another_table_is_another_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    forward(Q, tilegrad.Mask())
    nothing = Kernel("nothing", "attention.tiled", lambda problem: "takes nothing")
    monkeypatch.setattr(table, "ATTENTION", Table("attention", (nothing,)))
    with pytest.raises(ValueError, match="no kernel takes this call"):
        forward(Q, tilegrad.Mask())


def test_plans_do_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "_plans", {})
    monkeypatch.setattr(contract, "MOST_PLANS", 2)
    for scale in (0.1, 0.2, 0.3):
        forward(Q, tilegrad.Mask(scale=scale))
    assert len(contract._plans) == 1
