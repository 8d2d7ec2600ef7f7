"""Attacks by folders of weights: damaged and hostile config.json, indexes, safetensors, tokenizers and links.
Each goes through `import`, `train --init`, `generate` and `tilegrad.load`, and ends with a sentence that names the file."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import CONFIG, LLAMA

import tilegrad
from tilegrad import Engine
from tilegrad.cli import build_parser, main
from tilegrad.data.documents import default_text
from tilegrad.data.tokenizer import train_bpe
from tilegrad.pretrained.weights import write_weights

pytest.importorskip("tokenizers", reason="needs pip install 'tilegrad[bpe]'")
pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs and links")
WEIGHTS, INDEX, SETTINGS, TOKENIZER = (
    "model.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json",
)  # fmt: skip
DEEP = "[" * 5000 + "]" * 5000
JUNK: tuple[Any, ...] = (
    None, True, False, -1, 0, 3, 10**9, 10**20, 2**63, 2**70, 1.5, -0.0, 1e300, "", "x", "silu", [], [1], ["x"], [None], {},
    {"a": 1}, [[[[]]]], "9" * 3000, "../../x",
)  # fmt: skip
TEXTS = (
    b"", b"null", b"[]", b"3", b'"x"', b"{", b"{}", b"[{}]", DEEP.encode(), b'{"a":' * 5000, b'{"n_layer": NaN}',
    b'{"model_type": "llama", "num_hidden_layers": Infinity}', b"\xff\xfe{}", b"\x00" * 64, b'\xef\xbb\xbf{"a": 1}',
    b'{"n_layer": 1' + b"0" * 5000 + b"}", b'{"model_type": ["llama"]}', b'{"model": {"type": "BPE"}}',
    b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}', b'{"model": {"type": "WordLevel", "vocab": {"a": 4000000000}}}',
    b'{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "z"}}', b'{"model": []}', b'{"weight_map": []}',
    b'{"weight_map": {}}', b'{"weight_map": {"a": 3}}', b'{"weight_map": {"a": null, "b": ["x"]}}', b'{"weight_map": 3}',
)  # fmt: skip
KINDS = {  # the kind of attack → its relative frequency
    "config value": 8, "config key": 2, "config rope": 4, "config layers": 3, "text": 4, "flip": 3, "cut": 3, "header": 4,
    "tensors": 5, "index": 4, "tokenizer": 4, "no file": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A GPT-2, a Llama in shards, and a Qwen2 with windows; each with a tokenizer."""
    home = tmp_path_factory.mktemp("originals")
    text = default_text().read_text(encoding="utf-8")[20_000:30_000]
    tokenizer = train_bpe(text, 270).json()
    small: dict[str, Any] = {"vocab_size": 280, "block_size": 32}
    models = {
        "gpt2": (replace(CONFIG, **small, n_layer=1), None),
        "llama": (replace(LLAMA, **small, n_layer=1), 20_000),
        "qwen2": (replace(LLAMA, **small, n_layer=2, qkv_bias=True, window=5, window_layers=(1,)), None),
    }
    for name, (config, shard) in models.items():
        write_weights(home / name, Engine(config, 1, 4).params, config, max_shard_bytes=shard)
        (home / name / TOKENIZER).write_text(tokenizer, encoding="utf-8")
    (home / "text.txt").write_text(text[:2000], encoding="utf-8")
    (home / "secret.json").write_text('{"secret": 1}', encoding="utf-8")
    return [home / name for name in models]


def edit_json(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    change(content)
    file.write_text(json.dumps(content), encoding="utf-8")


def damage(folder: Path, dice: random.Random) -> str:
    """Damage the folder in one way, in place. Returns what was done."""
    kind = dice.choices([*KINDS], [*KINDS.values()])[0]
    tensors = dice.choice(sorted(folder.glob("*.safetensors")))
    files = [tensors, *(folder / name for name in (SETTINGS, INDEX, TOKENIZER) if (folder / name).exists())]
    if kind.startswith("config"):
        return damage_config(folder / SETTINGS, kind, dice)
    if kind == "tokenizer":
        return damage_tokenizer(folder / TOKENIZER, dice)
    if kind == "header":
        return damage_header(tensors, dice)
    if kind == "tensors":
        return damage_tensors(tensors, dice)
    if kind == "index":
        return damage_index(folder, dice)
    file = dice.choice(files)
    if kind == "no file":
        return f"{file.name} is {replace_file(file, dice)}"
    whole = bytearray(file.read_bytes())
    if kind == "text":
        whole[:] = dice.choice(TEXTS)
    elif kind == "cut":
        del whole[dice.choice((0, 1, 7, 8, 9, dice.randrange(len(whole)), len(whole) - 7, len(whole) - 1)) :]
    else:
        for _ in range(dice.choice((1, 1, 8))):
            whole[dice.randrange(min(len(whole), 400))] ^= 1 << dice.randrange(8)
    file.write_bytes(whole)
    return f"{kind} in {file.name}: {bytes(whole[:60])!r}"


def damage_config(file: Path, kind: str, dice: random.Random) -> str:
    content = json.loads(file.read_text(encoding="utf-8"))
    junk = dice.choice(JUNK)
    rope = {"rope_type": dice.choice(("linear", "llama3", "yarn", "default", 3)), "factor": 2.0}
    rope |= {dice.choice(("factor", "rope_theta", "beta_slow", "beta_fast", "low_freq_factor", "rope_type")): junk}
    name = dice.choice(sorted(content))
    if kind == "config key":
        del content[name]
    elif kind == "config rope":
        name = dice.choice(("rope_parameters", "rope_scaling"))
        content.pop("rope_parameters", None)
        content[name] = dice.choice((rope, rope, junk))
    elif kind == "config layers":
        name = "layer_types"
        layers = content.get("num_hidden_layers", 3)
        content[name] = dice.choice(
            (junk, ["sliding_attention"] * (layers + 1), ["x"] * layers, [3] * layers, ["a", []])
        )
    else:
        content[name] = junk
    file.write_text(json.dumps(content), encoding="utf-8")
    return f"{kind}: {name} = {str(content.get(name))[:60]}"


def damage_tokenizer(file: Path, dice: random.Random) -> str:
    content = json.loads(file.read_text(encoding="utf-8"))
    where: Any = content
    path = []
    while isinstance(where, dict) and where:
        key = dice.choice(sorted(where))
        path.append(key)
        if not isinstance(where[key], dict) or not where[key] or dice.random() < 0.4:
            break
        where = where[key]
    where[key] = dice.choice(JUNK)
    file.write_text(json.dumps(content), encoding="utf-8")
    return f"tokenizer: {path} = {str(where[key])[:40]}"


def damage_header(file: Path, dice: random.Random) -> str:
    """Write a false header."""
    whole = file.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    name = dice.choice([name for name in sorted(header) if name != "__metadata__"])
    field = dice.choice(("dtype", "shape", "data_offsets", "all"))
    junk = dice.choice((*JUNK, [2**62, 2**62], [-1], [0, 10**9], "F31", "F8_E4M3", "I64", "BOOL", [8, 4], [0, 0]))
    header[name] = junk if field == "all" else {**header[name], field: junk}
    text = json.dumps(header).encode()
    length = dice.choice((len(text), len(text), len(text), 2**63, 0, 10**9))
    file.write_bytes(length.to_bytes(8, "little") + text + whole[8 + size :])
    return f"header: {name}.{field} = {str(junk)[:40]}, length {length}"


def damage_tensors(file: Path, dice: random.Random) -> str:
    tensors = load_file(file)
    name = dice.choice(sorted(tensors))
    x = tensors[name]
    kind = dice.choice(("missing", "more", "shape", "empty", "int", "bool", "float8", "transposed", "none"))
    if kind == "missing":
        del tensors[name]
    elif kind == "more":
        tensors["model.layers.77.mlp.up_proj.weight"] = torch.ones(3)
    elif kind == "none":
        tensors = {}
    else:
        tensors[name] = {
            "shape": x.new_ones(3), "empty": x.new_ones(0), "int": x.to(torch.int64), "bool": x > 0,
            "float8": x.to(torch.float8_e4m3fn), "transposed": x[None].contiguous(),
        }[kind]  # fmt: skip
    save_file(tensors, file)
    return f"tensors: {name} {kind}"


def damage_index(folder: Path, dice: random.Random) -> str:
    """Write a false index of the shards. A single file gets an index first."""
    index = folder / INDEX
    if not index.exists():
        index.write_text(
            json.dumps({"weight_map": dict.fromkeys(load_file(folder / WEIGHTS), WEIGHTS)}), encoding="utf-8"
        )
    content = json.loads(index.read_text(encoding="utf-8"))
    names = content["weight_map"]
    name = dice.choice(sorted(names))
    kind = dice.choice(("file", "file", "file", "absent", "more", "whole"))
    if kind == "file":
        names[name] = dice.choice(
            (
                *JUNK,
                "/etc/passwd",
                "../secret.json",
                "a/b",
                "..",
                ".",
                "\0",
                "x" * 5000,
                "missing.safetensors",
                SETTINGS,
            )
        )
    elif kind == "absent":
        del names[name]
    elif kind == "more":
        names["no.such.tensor"] = names[name]
    else:
        content["weight_map"] = dice.choice(JUNK)
    index.write_text(json.dumps(content), encoding="utf-8")
    return f"index {kind}: {name} {str(names.get(name))[:40]}"


def replace_file(file: Path, dice: random.Random) -> str:
    kind = dice.choice(("folder", "FIFO", "device", "outside", "dangling", "loop", "absent"))
    file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind == "FIFO":
        os.mkfifo(file)
    elif kind != "absent":
        outside = str(file.parent.parent / "secret.json")
        targets = {"device": "/dev/zero", "outside": outside, "loop": file.name, "dangling": "/nowhere/at/all"}
        file.symlink_to(targets[kind])
    return kind


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise an error after so many seconds, because a read of a FIFO would wait for ever."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds the parser once, because building it takes longer than most refusals."""
    monkeypatch.setattr("tilegrad.cli.build_parser", functools.cache(build_parser))


def said_by(words: list[str]) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), at_most(20):
        code = main(words)
    return code, err.getvalue()


def through_all(folder: Path, home: Path) -> Counter[str]:
    """Each way in accepts the folder, or refuses it with exit code 2 and one sentence that names a file of the folder."""
    text, found = str(folder.parent / "text.txt"), Counter[str]()
    small = ["--data", text, "--steps", "1", "--batch-size", "1", "--seq-len", "8", "--train.eval_batches", "0"]
    for way, words in {
        "import": ["import", str(folder), "--out", str(home / "in")],
        "train": ["train", "--init", str(folder), "--out", str(home / "run"), *small, "--train.sample_tokens", "0"],
        "generate": ["generate", str(folder), "a", "--max-tokens", "1"],
    }.items():
        code, said = said_by(words)
        assert code in (0, 2), (way, code, said)
        assert code == 0 or (said.startswith("tilegrad: ") and said.count("\n") == 1), (way, said)
        assert code == 0 or str(folder) in said or "tokens: got" in said, (way, said)
        assert code == 0 or way == "generate" or not [*home.iterdir()], (way, said)
        found[f"{way} {code}"] += 1
        for path in home.iterdir():
            shutil.rmtree(path)
    try:
        with at_most(20):
            tilegrad.load(folder)
        found["load 0"] += 1
    except (ValueError, FileNotFoundError) as error:
        found["load 2" if str(folder) in str(error) else f"load without a name: {error}"] += 1
    return found


def attack_all(originals: list[Path], folder: Path, seeds: range) -> tuple[Counter[str], list[str]]:
    """(counts of what each way in accepted and refused; runs that ended in a traceback or in a sentence without a name)."""
    found, faults, out = Counter[str](), [], folder / "out"
    out.mkdir()
    for name in ("text.txt", "secret.json"):
        shutil.copy(originals[0].parent / name, folder)
    for seed in seeds:
        dice, victim = random.Random(seed), folder / "victim"
        shutil.copytree(originals[seed % len(originals)], victim)
        what = damage(victim, dice)
        try:
            one = through_all(victim, out)
            assert one["load 0"] + one["load 2"] == 1, one
            found += one
            found["refused"] += any(way.endswith("2") for way in one)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            faults.append(f"seed {seed}, {what}: {type(error).__name__}: {str(error)[:300]}")
            for path in out.iterdir():
                shutil.rmtree(path)
        shutil.rmtree(victim)
    return found, faults


def test_80_damaged_folders_of_weights_are_refused_by_name(originals: list[Path], tmp_path: Path) -> None:
    found, faults = attack_all(originals, tmp_path, range(80))
    assert not faults, f"{len(faults)} of 80:\n" + "\n".join(faults)
    assert found["refused"] > 60 and found["import 2"] > 50, found
    assert sum(found[f"{way} {code}"] for way in ("import", "train", "generate", "load") for code in (0, 2)) == 320


def test_a_context_shorter_than_the_run_is_refused_with_the_folders_name(originals: list[Path], tmp_path: Path) -> None:
    found, faults = attack_all(originals, tmp_path, range(254813670, 254813671))  # n_positions = 3
    assert not faults and found["train 2"] == 1, (found, faults)


@pytest.mark.slow
def test_four_thousand_damaged_folders_of_weights_are_refused_by_name(
    originals: list[Path], tmp_path: Path, four_hundred_seeds: range
) -> None:
    found, faults = attack_all(originals, tmp_path, four_hundred_seeds)
    assert not faults, f"{len(faults)} of 400:\n" + "\n".join(faults[:50])
    assert found["refused"] > 320, found


def hub(folder: Path, home: Path) -> Path:
    """A copy of the folder as in Hugging Face's cache: a snapshot with links to blobs."""
    blobs, snapshot = home / "models--a--b" / "blobs", home / "models--a--b" / "snapshots" / "main"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    return snapshot


@pytest.mark.parametrize("name", [SETTINGS, TOKENIZER, INDEX, "tokenizer_config.json"])
def test_links_that_leave_the_folder_are_refused_and_those_of_the_hub_are_read(
    name: str, originals: list[Path], tmp_path: Path
) -> None:
    model = originals[1]
    snapshot = hub(model, tmp_path)
    assert said_by(["import", str(snapshot), "--out", str(tmp_path / "in")])[0] == 0
    assert (tmp_path / "in" / TOKENIZER).read_bytes() == (model / TOKENIZER).read_bytes()
    assert not any(path.is_symlink() for path in (tmp_path / "in").iterdir())
    secret = tmp_path / "secret.json"
    shutil.copy(model / name if (model / name).exists() else model / TOKENIZER, secret)  # a file that would be read
    other = tmp_path / "models--c--d" / "blobs"
    other.mkdir(parents=True)
    shutil.copy(secret, other / "0")
    plain = tmp_path / "plain"
    shutil.copytree(model, plain)
    for folder, target in ((plain, secret), (plain, "../secret.json"), (snapshot, secret), (snapshot, other / "0")):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)
        code, said = said_by(["import", str(folder), "--out", str(tmp_path / "again")])
        assert (code, f"{folder / name}: got a link to" in said) == (2, True), said
        assert not (tmp_path / "again").exists()
    (plain / name).unlink()
    shutil.copy(secret, plain / "own")
    (plain / name).symlink_to("own")  # a link within the folder
    assert said_by(["import", str(plain), "--out", str(tmp_path / "again")])[0] == 0


def test_an_export_of_a_run_copies_no_link_that_leaves_its_folder(originals: list[Path], tmp_path: Path) -> None:
    run, text = tmp_path / "run", str(originals[0].parent / "text.txt")
    small = ["--data", text, "--steps", "1", "--batch-size", "1", "--seq-len", "8", "--train.eval_batches", "0"]
    assert said_by(["train", "--init", str(originals[0]), "--out", str(run), *small])[0] == 0
    assert said_by(["export", str(run), str(tmp_path / "first")])[0] == 0
    (tmp_path / "secret").write_text("secret", encoding="utf-8")
    (run / "origin" / "chat_template.jinja").symlink_to("../../secret")
    code, said = said_by(["export", str(run), str(tmp_path / "second")])
    assert code == 2 and "origin/chat_template.jinja: got a link to" in said, said
    assert not (tmp_path / "second").exists()
