"""Attacks by files: damaged and hostile checkpoints, damaged native libraries, two builds at once."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tilegrad.kernels.cpu import library as native_library
from tilegrad.native import build as native_build
from tilegrad.training.checkpoint import latest_checkpoint, load_checkpoint, load_into, save_checkpoint
from tilegrad.training.manifest import DamagedCheckpoint, _digest

TENSORS, MANIFEST = "tensors.safetensors", "manifest.json"
JUNK: tuple[Any, ...] = (
    None, True, -1, 2**80, 1e308, "", "x", "../../secret", "/etc/passwd", [], [[]], {}, {"..": {}},
    {"bytes": 3}, "\0", "é" * 99,
)  # fmt: skip


def tensors() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(12.0).view(3, 4), "b": torch.arange(4).to(torch.bfloat16)}


def signed(path: Path, content: dict[str, Any]) -> None:
    """Write a manifest with a right digest, whatever its content."""
    content.pop("sha256", None)
    path.write_text(json.dumps(content | {"sha256": _digest(content)}), encoding="utf-8")


def edit(path: Path, dice: random.Random) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    where: Any = content
    while isinstance(where, dict) and where:
        key = dice.choice(sorted(where))
        if not isinstance(where[key], dict) or not where[key] or dice.random() < 0.4:
            break
        where = where[key]
    if dice.random() < 0.3:
        del where[key]
    elif dice.random() < 0.3:
        where[dice.choice(("../x", "a/b", "", "\0", "x" * 5000))] = where.pop(key)
    else:
        where[key] = dice.choice(JUNK)
    signed(path, content)


def damage(checkpoint: Path, dice: random.Random) -> str:
    """Damage a checkpoint in one way. Returns the kind of damage."""
    file = checkpoint / dice.choice((TENSORS, MANIFEST))
    whole = file.read_bytes()
    kind = dice.choice(
        ("flip", "cut", "longer", "noise", "folder", "link", "dangling", "edit", "edit", "deep", "header")
    )
    if kind == "flip":
        changed = bytearray(whole)
        for _ in range(dice.choice((1, 1, 8))):
            changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
        file.write_bytes(changed)
    elif kind == "cut":
        file.write_bytes(whole[: dice.randrange(len(whole))])
    elif kind == "longer":
        file.write_bytes(whole + dice.randbytes(dice.randrange(1, 99)))
    elif kind == "noise":
        file.write_bytes(dice.randbytes(len(whole)))
    elif kind in ("folder", "link", "dangling"):
        file.unlink()
        if kind == "folder":
            file.mkdir()
        else:
            file.symlink_to("/dev/null" if kind == "link" else "/nowhere/at/all")
    elif kind == "edit":
        edit(checkpoint / MANIFEST, dice)
    elif kind == "deep":
        (checkpoint / MANIFEST).write_text(
            "[" * 100_000 if dice.random() < 0.5 else '{"a":' * 100_000, encoding="utf-8"
        )
    else:  # a false header of safetensors, with the right size and sha256 in the manifest
        header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")]) if file.name == TENSORS else {}
        for about in header.values():
            about[dice.choice(("dtype", "shape", "data_offsets"))] = dice.choice(
                ([2**62, 2**62], "F31", [-1], [0, 10**9])
            )
        text = json.dumps(header).encode()
        size = dice.choice((len(text), 2**63, 0))
        made = size.to_bytes(8, "little") + text + bytes(40)
        (checkpoint / TENSORS).write_bytes(made)
        content = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        content["files"][TENSORS] = {"bytes": len(made), "sha256": hashlib.sha256(made).hexdigest()}
        signed(checkpoint / MANIFEST, content)
    return kind


def hostile(folder: Path, seeds: range) -> int:
    """Load damaged checkpoints. Each is refused or has the saved tensors. Returns how many were refused."""
    original = folder / "original"
    good = [save_checkpoint(original, step, tensors(), {"seed": 5}) for step in (1, 2)]
    refused = 0
    for seed in seeds:
        dice, runs = random.Random(seed), folder / "runs"
        shutil.copytree(original, runs)
        newest, before = runs / good[1].name, runs / good[0].name
        kind = damage(newest, dice)
        around = sorted(path for path in folder.rglob("*") if newest not in path.parents)
        into = {name: torch.full_like(x, 7) for name, x in tensors().items()}
        try:
            found = load_checkpoint(newest)
            assert all(torch.equal(x, found.tensors[name]) for name, x in tensors().items()), (seed, kind)
            assert isinstance(found.step, int) and isinstance(found.state, dict), (seed, kind)
        except DamagedCheckpoint:
            refused += 1
            with pytest.raises(DamagedCheckpoint) as caught:
                latest_checkpoint(runs)
            assert caught.value.previous == before, (seed, kind)
            with pytest.raises(DamagedCheckpoint):
                load_into(newest, into)
            assert all(bool((x == 7).all()) for x in into.values()), (seed, kind)
        assert around == sorted(path for path in folder.rglob("*") if newest not in path.parents)
        shutil.rmtree(runs)
    return refused


def test_hostile_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    assert hostile(tmp_path, range(80)) > 40


@pytest.mark.slow
def test_five_thousand_hostile_checkpoints_are_refused_by_name(tmp_path: Path, fresh_seed: int) -> None:
    assert hostile(tmp_path, range(fresh_seed, fresh_seed + 5000)) > 2500


def test_a_save_into_a_file_or_a_read_only_folder_raises_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here", encoding="utf-8")
    with pytest.raises(OSError, match="file"):
        save_checkpoint(tmp_path / "file", 1, tensors(), {})
    if os.geteuid():
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(PermissionError, match="closed"):
            save_checkpoint(tmp_path / "closed", 1, tensors(), {})
    assert (tmp_path / "file").read_text(encoding="utf-8") == "here"


@pytest.mark.skipif(isinstance(native_library.library(), str), reason="needs the native library")
def test_a_damaged_native_library_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A truncated library must not be loaded, because that would end this process."""
    whole, digest = native_build.LIBRARY.read_bytes(), native_build.digest().encode()
    other = whole[:18] + bytes([whole[18] ^ 0xFF]) + whole[19:]  # e_machine, the architecture
    kinds = {"half": whole[: len(whole) // 2] + digest, "a byte less": whole[:-1], "header": whole[:40] + digest}
    try:
        for name, content in (kinds | {"other": other}).items():
            (tmp_path / name).write_bytes(content)
            monkeypatch.setattr(native_build, "LIBRARY", tmp_path / name)
            native_library.library.cache_clear()
            said = str(native_library.library())
            assert "can't be loaded" in said and "doctor --build" in said, name
            assert ("its file is truncated" in said) == (name in kinds)
    finally:
        monkeypatch.undo()
        native_library.library.cache_clear()


@pytest.mark.slow
@pytest.mark.skipif(native_build.compiler() is None, reason="needs a C++ compiler")
def test_two_builds_at_once_leave_one_whole_library(tmp_path: Path) -> None:
    to = tmp_path / native_build.LIBRARY.name
    builds = [threading.Thread(target=native_build.build, args=(to,)) for _ in range(2)]
    code = f"import pathlib; from tilegrad.native import build; build.build(pathlib.Path({str(to)!r}))"
    other = subprocess.Popen([sys.executable, "-c", code])
    for build in builds:
        build.start()
    for build in builds:
        build.join()
    assert other.wait() == 0
    assert native_build.digest().encode() in to.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == [to.name]
