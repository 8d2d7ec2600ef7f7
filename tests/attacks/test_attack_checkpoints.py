"""Attacks by checkpoints with false content and a right digest: state of wrong types and ranges; shapes, offsets and shards of
another model. Each goes through load, generate, export and resume. It is refused by a sentence, or gives the run's weights."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tilegrad
from tilegrad.cli import build_parser, main
from tilegrad.training.manifest import _digest

TENSORS, MANIFEST = "tensors.safetensors", "manifest.json"
JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 1, 7, 2**63, 2**80, 1.5, 1e308, "", "x", "1", "../../secret", [], [[]], [1], {}, {"a": 1}, [-1, 4],
)  # fmt: skip


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run with two checkpoints, and a copy of it with the shards that two ranks would write."""
    home = tmp_path_factory.mktemp("runs")
    model = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16, "dropout": 0.1}
    settings = {"steps": 2, "batch_size": 1, "checkpoint_interval": 1, "eval_interval": 0, "sample_tokens": 0}
    text = home / "text.txt"
    text.write_text("Call me Ishmael. Some years ago, never mind how long precisely. " * 20, encoding="utf-8")
    tilegrad.train({"model": model, "train": settings, "data": {"files": [str(text)]}}, home / "whole")
    shutil.rmtree(home / "whole" / "best", ignore_errors=True)
    shutil.copytree(home / "whole", home / "shards")
    for path in (home / "shards" / "checkpoints").iterdir():
        shard(path)
    return [home / "whole", home / "shards"]


def shard(path: Path) -> None:
    """Replace the one file by two shards in the format of torch's distributed checkpoint."""
    tensors, content = load_file(path / TENSORS), json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    content["state"] |= {
        "shapes": {name: [*x.shape] for name, x in tensors.items() if f"m.{name}" in tensors}, "ranks": 2,
    }  # fmt: skip
    content["files"] = {}
    for rank in range(2):
        part, at = {}, {}
        for name, x in tensors.items():
            middle = x.numel() // 2
            run = x.view(-1)[middle * rank :] if rank else x.view(-1)[:middle]
            if run.numel():
                part[name], at[name] = run.clone(), {"saved_offsets": [middle * rank]}
        write_shard(path, content, f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors", part, at)
    (path / TENSORS).unlink()
    sign(path, content)


def write_shard(path: Path, content: dict[str, Any], name: str, part: dict[str, torch.Tensor], at: Any) -> None:
    save_file(part, path / name, {"DCP_SHARDING_INFO": at if isinstance(at, str) else json.dumps(at)})
    whole = (path / name).read_bytes()
    content["files"][name] = {"bytes": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}


def sign(path: Path, content: dict[str, Any]) -> None:
    content.pop("sha256", None)
    (path / MANIFEST).write_text(json.dumps(content | {"sha256": _digest(content)}), encoding="utf-8")


def falsify(path: Path, dice: random.Random) -> str:
    """Change one thing in a checkpoint and make all digests right. Returns what was changed."""
    content = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    kind = dice.choice(("state", "state", "state", "model", "engine", "tensors", "offsets", "files"))
    if kind == "tensors" or kind == "offsets":
        what = falsify_tensors(path, content, kind, dice)
    else:
        where: Any = content if kind == "files" else content["state"]
        where = {"model": lambda: where["run"]["model"], "engine": lambda: where["engine"]}.get(kind, lambda: where)()
        names = []
        while True:
            key = dice.choice(sorted(where)) if isinstance(where, dict) else dice.randrange(len(where))
            names.append(key)
            if not isinstance(where[key], dict | list) or not where[key] or dice.random() < 0.3:
                break
            where = where[key]
        old = where[key]
        if dice.random() < 0.15 and isinstance(where, dict):
            del where[key]
            what = f"{names} is gone"
        else:
            number = isinstance(old, int | float) and not isinstance(old, bool) and dice.random() < 0.4
            where[key] = dice.choice((old + 1, -old, old * 2, old + 0.5, str(old))) if number else dice.choice(JUNK)
            what = f"{names} = {str(where[key])[:60]}"
    sign(path, content)
    return f"{kind}: {what}"


def falsify_tensors(path: Path, content: dict[str, Any], kind: str, dice: random.Random) -> str:
    file = dice.choice(sorted(path.glob("*.safetensors")))
    tensors = load_file(file)
    name = dice.choice(sorted(tensors))
    x = tensors[name]
    at = {name: {"saved_offsets": [0]} for name in tensors}
    if file.name != TENSORS:
        header = json.loads(file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")])
        at = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
    given: Any = at
    if kind == "offsets":
        value = dice.choice((*JUNK, [1], [-1], [2**70], [0.5], [[0]], [0, 0]))
        how = dice.choice(("offset", "about", "gone", "all"))
        if how == "offset":
            at[name] = {"saved_offsets": value}
        elif how == "about":
            at[name] = value
        elif how == "gone":
            at.pop(name)
        else:
            given = dice.choice(("", "[", "[]", "3", "[" * 5000, json.dumps(value)))
        what = f"{name} {how} {str(value)[:40]}"
    else:
        how = dice.choice(("gone", "longer", "shorter", "shape", "int", "half", "more", "none"))
        what = f"{file.name}: {name} {how}"
        if how == "gone":
            del tensors[name]
        elif how == "more":
            tensors["blocks.9.ln1.weight"] = torch.ones(16)
            at["blocks.9.ln1.weight"] = {"saved_offsets": [0]}
        elif how == "none":
            tensors = {}
        else:
            tensors[name] = {
                "longer": torch.cat([x.view(-1), x.view(-1)[:1]]), "shorter": x.view(-1)[1:].clone(),
                "shape": x[None].clone(), "int": x.to(torch.int32), "half": x.bfloat16(),
            }[how]  # fmt: skip
    write_shard(path, content, file.name, tensors, given)
    return what


def through_all(run: Path, out: Path, weights: dict[str, torch.Tensor], *, resume: bool) -> Counter[str]:
    """Each way in refuses the checkpoint by a sentence that names it or the run, or gives the run's own weights."""
    found = Counter[str]()
    ways = {"generate": ["generate", str(run), "Call", "--max-tokens", "1"], "export": ["export", str(run), str(out)]}
    if resume:
        ways["resume"] = ["train", "--resume", str(run), "--steps", "3"]
    for way, words in ways.items():
        said, quiet = io.StringIO(), io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(quiet):
            code = main(words)
        sentence = said.getvalue()
        assert code in (0, 2), (way, code, sentence)
        assert code == 0 or (sentence.startswith("tilegrad: ") and sentence.count("\n") == 1), (way, sentence)
        assert code == 0 or str(run) in sentence or ": got " in sentence, (way, sentence)
        if way == "export" and code == 0:
            exported = load_file(out / "model.safetensors")
            assert len(exported) == len(weights), (way, len(exported))
            for name in ("transformer.wte.weight", "transformer.h.1.ln_1.weight"):
                assert torch.equal(exported[name], weights[name]), (way, name)
        shutil.rmtree(out, ignore_errors=True)
        found[f"{way} {code}"] += 1
    try:
        tilegrad.load(run)
        found["load 0"] += 1
    except (ValueError, FileNotFoundError) as error:
        found["load 2" if str(run) in str(error) else f"load without a name: {error}"] += 1
    return found


def attack_all(originals: list[Path], home: Path, seeds: range, *, resume_every: int) -> tuple[Counter[str], list[str]]:
    """(counts of what each way accepted and refused; runs that ended in a traceback, without a name, or with another model)."""
    found, faults, run, out = Counter[str](), [], home / "run", home / "out"
    assert main(["export", str(originals[0]), str(out)]) == 0
    weights = load_file(out / "model.safetensors")
    shutil.rmtree(out)
    for seed in seeds:
        dice = random.Random(seed)
        shutil.copytree(originals[seed % 2], run)
        what = falsify(max((run / "checkpoints").iterdir()), dice)
        try:
            one = through_all(run, out, weights, resume=seed % resume_every == 0)
            assert one["load 0"] + one["load 2"] == 1, one
            found += one
            found["refused"] += any(way.endswith("2") for way in one)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            faults.append(f"seed {seed}, {what}: {type(error).__name__}: {str(error)[:300]}")
            shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(run)
    return found, faults


@pytest.fixture(autouse=True)
def one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds the parser once, because building it takes longer than most refusals."""
    monkeypatch.setattr("tilegrad.cli.build_parser", functools.cache(build_parser))


def test_correct_shards_give_the_weights_of_the_run(originals: list[Path]) -> None:
    a, b = (tilegrad.load(run).params for run in originals)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_50_false_checkpoints_are_refused_by_name(originals: list[Path], tmp_path: Path) -> None:
    found, faults = attack_all(originals, tmp_path, range(50), resume_every=10)
    assert not faults, f"{len(faults)} of 50:\n" + "\n".join(faults)
    assert found["refused"] >= 30 and found["resume 2"] > 1 and found["export 2"] > 25, found


def test_a_data_position_with_a_different_seq_len_is_refused_by_name(originals: list[Path], tmp_path: Path) -> None:
    found, faults = attack_all(
        originals, tmp_path, range(32575816, 32575817), resume_every=1
    )  # state['data']['seq_len'] = 17
    assert not faults and found["resume 2"] == 1, (found, faults)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_three_thousand_false_checkpoints_are_refused_by_name(
    part: int, originals: list[Path], tmp_path: Path, fresh_seed: int
) -> None:
    first = fresh_seed + 300 * part
    found, faults = attack_all(originals, tmp_path, range(first, first + 300), resume_every=1)
    assert not faults, f"{len(faults)} of 300:\n" + "\n".join(faults[:50])
    assert found["refused"] > 200 and found["resume 2"] > 140, found
