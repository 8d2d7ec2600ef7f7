"""Every pair of values of a run's keys: planned, trained, stopped, resumed to the same bits, generated from and exported."""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import itertools
import json
import os
import re
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import equal
from support.native import needs_library
from support.pairwise import Spec, all_pairs, covering, pairs
from support.run_keys import ABSENT, AXES, KEYS, REFUSED, TOKENIZER_FILE, allowed, refused_together

import tilegrad
from tilegrad.cli import main
from tilegrad.data.documents import default_text
from tilegrad.data.tokenizer import train_bpe
from tilegrad.engine.engine import Engine
from tilegrad.engine.recompute import choose_recompute
from tilegrad.engine.spec import StepSpec
from tilegrad.model.lora import LoraConfig
from tilegrad.pretrained.adapters import adapter_shapes, write_adapter
from tilegrad.pretrained.weights import open_weights, write_weights
from tilegrad.training import loop
from tilegrad.training.checkpoint import latest_checkpoint, load_checkpoint
from tilegrad.training.config import DTYPES
from tilegrad.training.export import export_run
from tilegrad.training.keys import keys
from tilegrad.training.schedule import learning_rate
from tilegrad.training.sections import read_toml, run_from, settled

PAIRS, ROWS = 28_511, 69  # pairs of allowed values, and runs that have all of them, from seed 0
PAIRS_IN_CI, ROWS_IN_CI, EXPORTED_IN_CI = 17_400, 8, 2
REFUSALS = 187  # number of combinations that are refused


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the keys name: texts of every kind, a tokenizer."""
    folder = tmp_path_factory.mktemp("texts")
    text = default_text().read_text(encoding="utf-8")[:9000]
    (folder / "text.txt").write_text(text, encoding="utf-8")
    (folder / "text.txt.gz").write_bytes(gzip.compress(text.encode("utf-8")))
    lines = [json.dumps({"text": line, "body": line[::-1]}) for line in text.splitlines() if line]
    (folder / "lines.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "folder").mkdir()
    shutil.copy(folder / "text.txt", folder / "folder" / "inner.md")
    (folder / "tokenizer.json").write_text(train_bpe(text, TOKENIZER_FILE).json(), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def without_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "chosen_loggers", lambda _log: ())


@pytest.fixture(autouse=True)
def with_a_short_default_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """tilegrad's bundled text takes a second to encode, in each row without files."""
    monkeypatch.setattr("tilegrad.training.dataset.default_text", lambda: Path("text.txt"))


@functools.cache
def rows_of_seed_0() -> list[Spec]:
    return covering(AXES, allowed)


def write(row: Spec, file: Path) -> None:
    lines = []
    for section in ("model", "train", "optimizer", "data", "lora"):
        lines.append(f"[{section}]")
        for key, value in row.items():
            if key.startswith(f"{section}.") and value != ABSENT:
                lines.append(f"{key.partition('.')[2]} = " + ('"none"' if value == "none" else str(value)))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def with_the_least_budget(row: Spec, file: Path) -> Spec:
    write(row | {"train.memory_budget": "none"}, file)
    run = settled(run_from(read_toml(file), "run.toml"))
    t, device = run.train, torch.device("cpu")
    spec = StepSpec(
        run.model, t.batch_size, t.seq_len, DTYPES[t.dtype], device,
        documents=run.documents, invariant=t.invariant, lora=run.lora, freeze=t.freeze, muon=run.muon,
        windows=run.windows, ema=run.optimizer.ema, states=run.states,
    )  # fmt: skip
    with pytest.raises(ValueError, match="memory_budget: got 1 bytes; accepted: at least") as error:
        choose_recompute(spec, 1)
    least = re.search(r"at least ([\d,]+)", str(error.value))
    assert least
    return row | {"train.memory_budget": least[1].replace(",", "")}


def stops_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends Ctrl-C while this step is prepared, so that it is the last."""
    genuine = learning_rate

    def rate(now: int, **options: Any) -> float:
        if now == step:
            os.kill(os.getpid(), signal.SIGINT)
        return genuine(now, **options)

    monkeypatch.setattr(loop, "learning_rate", rate)


def said(*words: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([*words]) == 0
    return out.getvalue()


def newest(folder: str) -> Any:
    path = latest_checkpoint(Path(folder) / "checkpoints")
    assert path is not None
    return load_checkpoint(path)


def check_row(row: Spec, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Checks a row and returns what it reached. The current folder has the texts and no file of another row."""
    file, reached = Path("row.toml"), Counter[str]()
    write(row | {"train.memory_budget": "none", "lora.adapter": "none"}, file)
    run = run_from(read_toml(file), "run.toml")
    if run.train.init is not None:
        params = Engine(run.model, 1, 1, seed=99).params
        write_weights(Path(run.train.init), params, run.model, tokenizer=Path("tokenizer.json"))
        reached["began with weights"] = 1
    if row["lora.adapter"] != "none":
        lora = run.lora or LoraConfig()
        adapters = {name: torch.full(shape, 0.01) for name, shape in adapter_shapes(run.model, lora).items()}
        write_adapter(Path("adapter"), adapters, run.model, lora, kind=str(row["family"]), base="weights")
        reached["began with adapters"] = 1
    if row["train.memory_budget"] == "least":
        row = with_the_least_budget(row, file)
        reached["least budget"] = 1
    write(row, file)
    run = run_from(read_toml(file), "run.toml")
    planned = json.loads(said("plan", str(file), "--json"))
    whole = tilegrad.train(file, "whole")
    assert (whole.steps, whole.stopped_by) == (run.train.steps, None)
    assert whole.planned_bytes >= planned["peak_bytes"], "the plan of a step is within the run's"
    with monkeypatch.context() as patch:
        stops_at(row["stop"], patch)
        stopped = tilegrad.train(file, "run")
    assert (stopped.steps, stopped.stopped_by) == (row["stop"] + 1, "SIGINT")
    file.unlink()
    elsewhere = {"train": {"memory_budget": "none", "log_interval": 2, "keep_checkpoints": 1, "sample_tokens": 0}}
    resumed = tilegrad.train(elsewhere, resume="run")
    a, b = newest("whole"), newest("run")
    assert equal(a.tensors, b.tensors), "another end than without the stop"
    assert all(a.state[name] == b.state[name] for name in ("engine", "data", "validation_loss", "train_loss"))
    assert (resumed.train_loss, resumed.validation_loss) == (whole.train_loss, whole.validation_loss)
    reached["resumed to the same bits"] = 1
    for best in (False, True) if whole.best is not None else (False,):
        model = tilegrad.load("run", best=best)
        again = tilegrad.load("whole", best=best)
        assert model.step == again.step and equal(model.params, again.params)
        assert model.generate("the", 4) == again.generate("the", 4)
    reached["generated"] = 1
    reached["averaged"] = tilegrad.load("run").weights == "averaged"
    assert reached["averaged"] == (run.optimizer.ema > 0)
    reached["had a best one"] = whole.best is not None
    refused = ""
    try:
        export_run(Path("run"), Path("export"))
    except ValueError as error:
        refused = str(error)
    if refused:
        assert row["family"] == "", refused
        assert re.match(r"this model can't be exported as \w+: \w+(, \w+)*: got .*; accepted: ", refused)
        return reached + Counter({"export refused": 1})
    model = tilegrad.load("run")
    exported = open_weights(Path("export"))
    assert equal(exported.read(), {name: x.float() for name, x in model.params.items()})
    assert (exported.tokenizer is None) == (run.data.tokenizer == "bytes"), "another's tokenizer next to the weights"
    if run.data.tokenizer != "bytes":
        loaded = tilegrad.load("export")
        assert loaded.generate("the", 4) == model.generate("the", 4)
    reached["exported"] = 1
    return reached


def check_rows(rows: list[Spec], texts: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    reached = Counter[str](rows=0)
    for number, row in enumerate(rows):
        home = folder / str(number)
        shutil.copytree(texts, home)
        monkeypatch.chdir(home)
        try:
            reached += check_row(row, monkeypatch)
        except BaseException as error:
            error.add_note(f"row {number}: {row}")
            raise
        reached["rows"] += 1
        monkeypatch.chdir(folder)
        shutil.rmtree(home)
    return reached


def test_every_key_of_a_run_has_values_here() -> None:
    assert [f"{key.section}.{key.name}" for key in keys()] == list(KEYS)
    assert all(len(set(values)) > 1 for values in KEYS.values())


def test_the_rows_have_every_pair_of_values_that_are_allowed_together() -> None:
    rows = rows_of_seed_0()
    every = all_pairs(AXES, allowed)
    assert set.union(*map(pairs, rows)) == every
    assert (len(rows), len(every)) == (ROWS, PAIRS)
    assert len(set.union(*map(pairs, rows[:ROWS_IN_CI]))) >= PAIRS_IN_CI


@needs_library  # train.invariant needs it
def test_runs_of_many_pairs_of_keys_are_resumed_to_the_same_bits_and_exported(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = check_rows(rows_of_seed_0()[:ROWS_IN_CI], texts, tmp_path, monkeypatch)
    assert reached["resumed to the same bits"] == reached["generated"] == ROWS_IN_CI
    assert 0 < reached["averaged"] < ROWS_IN_CI
    assert reached["exported"] >= EXPORTED_IN_CI and reached["exported"] + reached["export refused"] == ROWS_IN_CI


@pytest.mark.slow
def test_runs_of_every_pair_of_keys_are_resumed_to_the_same_bits_and_exported(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_seed: int
) -> None:
    rows = covering(AXES, allowed, fresh_seed)
    assert set.union(*map(pairs, rows)) == all_pairs(AXES, allowed)
    reached = check_rows(rows, texts, tmp_path, monkeypatch)
    assert reached["resumed to the same bits"] == reached["generated"] == len(rows)
    assert reached["exported"] >= len(rows) // 2 and min(reached["least budget"], reached["began with weights"]) >= 5


FIRST = {key: values[0] for key, values in KEYS.items()} | {"train.steps": "1"}
ROPE = {"model.position": '"rope"'}


def combinations() -> list[tuple[tuple[str, ...], Spec]]:
    """(keys, a run with values of them that are refused together)."""
    return [
        (names, FIRST | (ROPE if names[0] == "model.rope_theta" else {}) | dict(zip(names, values, strict=True)))
        for names, rule in REFUSED.items()
        for values in itertools.product(*(KEYS[name] for name in names))
        if rule(*values)
    ]


def test_values_that_are_not_allowed_together_are_refused_by_the_name_of_a_key(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = combinations()
    assert len(found) == REFUSALS
    for number, (names, row) in enumerate(found):
        home = tmp_path / str(number)
        shutil.copytree(texts, home)
        monkeypatch.chdir(home)
        write(row, Path("row.toml"))
        assert refused_together(row) is not None
        with pytest.raises(ValueError, match=r"^(optimizer\.)?\w+: got .*; accepted: ") as error:
            tilegrad.train("row.toml", "run")
        key = str(error.value).partition(":")[0].removeprefix("optimizer.")
        assert key in {name.partition(".")[2] for name in names} | {"position", "init"}, (row, error.value)
        assert not Path("run").exists()


@pytest.mark.parametrize(("key", "value"), [("train.linear", '"fp8"'), ("train.device", '"mps"')])
def test_values_without_a_kernel_on_this_machine_are_refused(
    key: str, value: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(texts, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    write(FIRST | {key: value}, Path("row.toml"))
    with pytest.raises(ValueError, match=rf"^{key.partition('.')[2]}: got {value.strip(chr(34))!r}.*; accepted: "):
        tilegrad.train("row.toml", "run")
    assert not Path("run").exists()
