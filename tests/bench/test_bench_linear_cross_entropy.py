"""`benchmarks.linear_cross_entropy`: its table names an absent peer, and its check sees errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tilegrad
from benchmarks import linear_cross_entropy as bench


def test_the_table_names_wrong_and_absent_contenders(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(*_: Tensor) -> Tensor:
        raise ImportError("No module named 'peer'")

    def wrong(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
        return bench.plain(x, w, targets) * 1.05

    ours = {"tilegrad": tilegrad.linear_cross_entropy, "torch": bench.plain, "wrong": wrong, "absent": absent}
    monkeypatch.setattr(bench, "contenders", lambda: ours)
    assert bench.main(["--device", "cpu", "--tiny", "--repeats", "2", "--dtype", "float32"]) == 0
    printed = capsys.readouterr().out
    assert "absent: left out: ImportError: No module named 'peer'" in printed
    rows = {line.split()[0]: line for line in printed.splitlines() if line}
    assert rows["tilegrad"].endswith("yes") and rows["torch"].endswith("yes")
    assert "no: dx: " in rows["wrong"] and "dw: " in rows["wrong"]
    monkeypatch.setattr(bench, "contenders", lambda: {"tilegrad": wrong})
    assert bench.main(["--device", "cpu", "--tiny", "--repeats", "1"]) == 1


def test_no_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="repeats: got 0; accepted: at least 1"):
        bench.main(["--device", "cpu", "--tiny", "--repeats", "0"])


def test_the_check_sees_one_wrong_row_and_a_shared_factor() -> None:
    """Gradients of logits in bfloat16 include a rounded 1 / 115, so every gradient has the same factor."""
    given = ((128, 16, 1024), torch.device("cpu"), torch.bfloat16)

    def wrong(name: str) -> bench.Loss:
        def loss(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
            changed = {"dx": x.clone(), "dw": w.clone()}
            factor = torch.ones(len(changed[name]), 1, dtype=x.dtype)
            factor[targets[7] if name == "dw" else 7] = 1.05
            changed[name].register_hook(lambda g: g * factor)
            return tilegrad.linear_cross_entropy(changed["dx"], changed["dw"], targets)

        return loss

    assert bench.disagreement(tilegrad.linear_cross_entropy, *given) == ""
    for name in ("dx", "dw"):
        assert bench.disagreement(wrong(name), *given).startswith(f"{name}: largest error ")
    assert bench.disagreement(bench.plain, *given).count("factor of x64 in the error") == 2
