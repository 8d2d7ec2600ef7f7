"""The command line as a person meets it."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tilegrad import check, gradcheck
from tilegrad.cli import build_parser, main


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(word in out for word in ("demo", "check", "gradcheck", "exact, hand-derived"))
    assert build_parser().prog == "tilegrad"


def test_help_answers_within_a_second_and_loads_no_torch() -> None:
    code = "import sys; from tilegrad.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        best = min(best, time.perf_counter() - start)
    assert best < 1.0


def test_no_command_and_a_wrong_one_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["chekc"], ["check"], ["check", "flash", "--wrong"]):
        with pytest.raises(SystemExit, match="2"):
            main(argv)
    assert "usage: tilegrad" in capsys.readouterr().err


def test_check_flash_prints_what_the_document_asks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "flash"]) == 0
    out = capsys.readouterr().out
    for words in ("Q (4 × 4)", "dO (4 × 4)", "O (4 × 4)", "dQ by whole matrices (4 × 4)", "dK by tiled (128 × 64)",
                  "max difference", "average", "above 0.001", "above 0.005", "0 of 8192"):  # fmt: skip
        assert words in out
    assert out.count("PASS") == 2 and "FAIL" not in out


def test_check_flash_cases_are_the_documents() -> None:
    first, second = check.flash_cases()
    assert first.tolerance == 1e-3 and second.tolerance == 5e-3
    assert first.q.tolist() == first.k.tolist() and first.q[0, 0].trace() == 4
    assert first.v[0, 0, 2, 3].item() == pytest.approx(1.1) and first.do.equal(first.v)
    assert second.q.shape == (1, 1, 128, 64) and second.q.abs().max() <= 0.5


def test_canary_check_flash_fails_on_a_wrong_gradient(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tilegrad.kernels.attention import tiled

    right = tiled._bwd_delta
    monkeypatch.setattr(tiled, "_bwd_delta", lambda *a, delta, **k: (right(*a, delta=delta, **k), delta.add_(0.1)))
    assert main(["check", "flash", "--brief"]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_a_bad_value_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "flash", "--kernel", "nope"]) == 2
    assert capsys.readouterr().err == "tilegrad: kernel: got 'nope'; accepted: None or one of 'tiled', 'reference'\n"


def test_gradcheck_passes_and_its_canary_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gradcheck, "SAMPLES", 6)
    assert main(["gradcheck"]) == 0
    assert "PASS" in capsys.readouterr().out
    from tilegrad.kernels.attention import tiled

    right = tiled._bwd_delta
    monkeypatch.setattr(tiled, "_bwd_delta", lambda *a, delta, **k: (right(*a, delta=delta, **k), delta.mul_(1.001)))
    assert main(["gradcheck"]) == 1
    assert "FAIL: q, k, bias, sinks" in capsys.readouterr().out


def test_the_demo_runs_both(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gradcheck, "SAMPLES", 4)
    assert main(["demo"]) == 0
    out = capsys.readouterr().out
    assert "Training comes in a later version" in out and out.count("PASS") == 3 and "Everything passed" in out
