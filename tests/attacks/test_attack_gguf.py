"""Attacks by GGUF files: flipped, missing and inserted bytes, counts of 2⁶³, tensors beyond the file, values of another type.
Each goes through `import`, which gives a folder or one sentence that names the file, and takes little memory."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import shutil
import struct
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.models import CONFIG, LLAMA

from tilegrad import Engine
from tilegrad.cli import build_parser, main
from tilegrad.data.documents import default_text
from tilegrad.data.tokenizer import train_bpe
from tilegrad.pretrained.gguf.container import open_container
from tilegrad.pretrained.gguf.write import write_gguf

pytest.importorskip("gguf", reason="needs pip install 'tilegrad[gguf]'")
pytest.importorskip("tokenizers", reason="needs pip install 'tilegrad[gguf]'")
COUNTS = (0, 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1)
MOST_BYTES = 8 << 20  # memory that an import may take; the files have 80 kB


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """A GPT-2, a Llama and a Qwen2, with a tokenizer."""
    home = tmp_path_factory.mktemp("originals")
    text = default_text().read_text(encoding="utf-8")[20_000:30_000]
    (home / "tokenizer.json").write_text(train_bpe(text, 270).json(), encoding="utf-8")
    small = {"vocab_size": 280, "block_size": 32, "n_layer": 1}
    models = [replace(CONFIG, **small), replace(LLAMA, **small), replace(LLAMA, **small, qkv_bias=True)]  # type: ignore[arg-type]
    for number, config in enumerate(models):
        write_gguf(home / f"{number}.gguf", Engine(config, 1, 4).params, config, tokenizer=home / "tokenizer.json")
    return [(home / f"{number}.gguf").read_bytes() for number in range(len(models))]


@pytest.fixture(autouse=True)
def one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds the parser once, because building it takes longer than most refusals."""
    monkeypatch.setattr("tilegrad.cli.build_parser", functools.cache(build_parser))


def imported(file: Path, out: Path) -> tuple[int, str]:
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        code = main(["import", str(file), "--out", str(out)])
    return code, err.getvalue()


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def damage(whole: bytes, dice: random.Random) -> tuple[bytes, str]:
    """Damage the file in one way. Returns its bytes and what was done."""
    start = min(entry for entry in (whole.find(b"token_embd.weight"), len(whole)) if entry > 0)
    kind = dice.choice(("flip", "flip", "table", "cut", "count", "length", "insert", "zeros", "key"))
    out, at = bytearray(whole), 0
    if kind == "flip":
        for _ in range(dice.choice((1, 1, 4, 16))):
            at = dice.randrange(1200)
            out[at] ^= 1 << dice.randrange(8)
    elif kind == "table":
        at = dice.randrange(start - 8, start + 400)
        out[at] = dice.randrange(256)
    elif kind == "cut":
        at = dice.choice((0, 1, 3, 4, 8, 23, 24, dice.randrange(start), dice.randrange(len(out)), len(out) - 1))
        del out[at:]
    elif kind == "count":
        at = dice.choice((8, 16))
        struct.pack_into("<Q", out, at, dice.choice((*COUNTS, 3)))
    elif kind == "length":  # the length of a string or an array, a dimension or an offset
        at = dice.randrange(24, start + 400)
        struct.pack_into("<Q", out, at, dice.choice(COUNTS))
    elif kind == "insert":
        at = dice.randrange(start + 300)
        out[at:at] = dice.randbytes(dice.choice((1, 8, 32)))
    elif kind == "zeros":
        at = dice.randrange(start)
        out[at : at + dice.choice((4, 64, 4096))] = bytes(dice.choice((4, 64, 4096)))
    else:
        known = [
            name
            for name in (b"block_count", b"head_count", b"tokens", b"merges", b"alignment", b"ffn_up", b"pre")
            if name in out
        ]
        name = dice.choice(known)
        at = out.index(name)
        out[at : at + len(name)] = (b"../../" + name)[: len(name)]
    return bytes(out), f"{kind} at {at}"


def attack_all(originals: list[bytes], folder: Path, seeds: range) -> tuple[Counter[int], list[str]]:
    """(exit code → number of files; the files that ended in another way)."""
    found, faults = Counter[int](), []
    file, out = folder / "victim.gguf", folder / "out"
    for seed in seeds:
        content, what = damage(originals[seed % len(originals)], random.Random(seed))
        file.write_bytes(content)
        tracemalloc.start()
        try:
            code, said = imported(file, out)
            peak = tracemalloc.get_traced_memory()[1]
            found[code] += 1
            assert code == 0 or code == 2 and said.startswith("tilegrad: ") and said.count("\n") == 1, said
            assert code == 0 or str(file) in said and len(said) < 1000, said
            assert out.exists() == (code == 0)
            assert peak < MOST_BYTES, f"{peak:,} bytes"
            assert sorted(p.name for p in folder.iterdir()) == [*(["out"] if code == 0 else []), "victim.gguf"]
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            faults.append(f"seed {seed}, {what}: {type(error).__name__}: {str(error)[:300]}")
        finally:
            tracemalloc.stop()
        shutil.rmtree(out, ignore_errors=True)
    return found, faults


def test_90_damaged_files_are_refused_by_name(originals: list[bytes], tmp_path: Path) -> None:
    found, faults = attack_all(originals, tmp_path, range(90))
    assert not faults, f"{len(faults)} of 90:\n" + "\n".join(faults)
    assert found[2] > 65 and found[0] + found[2] == 90, found


@pytest.mark.slow
def test_four_thousand_damaged_files_are_refused_by_name(
    originals: list[bytes], tmp_path: Path, four_hundred_seeds: range
) -> None:
    found, faults = attack_all(originals, tmp_path, four_hundred_seeds)
    assert not faults, f"{len(faults)} of 400:\n" + "\n".join(faults[:50])
    assert found[2] > 280, found


def value(key: bytes, kind: int, raw: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + raw


def header(n_tensors: int, *values: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, len(values)) + b"".join(values)


def entry(name: bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


HOSTILE = {
    "nothing": (b"", "got the end of the file at byte 0"),
    "another format": (b"PK\3\4" * 99, "got b'PK.x03.x04' at its start; accepted: b'GGUF'"),
    "version": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "got version 1; accepted: 2 or 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648, of a big-endian file"),
    "2⁶³ values": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "got the end of the file"),
    "2⁶³ tensors": (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "got the end of the file"),
    "a string of 2⁶³": (header(0, value(b"a", 8, struct.pack("<Q", 2**63))), "got the end of the file .* in 'a'"),
    "2⁶⁴ − 1 numbers": (header(0, value(b"a", 9, struct.pack("<IQ", 4, 2**64 - 1))), "got the end of the file"),
    "2⁶⁰ strings": (header(0, value(b"a", 9, struct.pack("<IQ", 8, 2**60))), "got 1,152,921,504,606,846,976 strings in 'a'"),
    "an array in an array": (header(0, value(b"a", 9, struct.pack("<IQ", 9, 2**40))), "got type 9 of 'a'; accepted: 0 … 12"),
    "a type": (header(0, value(b"a", 13, b"")), "got type 13 of 'a'"),
    "a key twice": (header(0, value(b"a", 7, b"\1"), value(b"a", 7, b"\1")), "got 'a' twice"),
    "no UTF-8": (header(0, value(b"\xff\xfe", 7, b"\1")), "the name of a value that is not UTF-8"),
    "alignment 0": (header(0, value(b"general.alignment", 4, bytes(4))), "got general.alignment 0; accepted: a power of two"),
    "alignment 2³¹": (header(0, value(b"general.alignment", 4, struct.pack("<I", 2**31))), "got general.alignment 2147483648"),
    "no dimension": (header(1) + entry(b"x", ()), "got 0 dimensions of 'x'; accepted: 1 … 4"),
    "2³² − 1 dimensions": (header(1) + string(b"x") + struct.pack("<I", 2**32 - 1), "got 4294967295 dimensions"),
    "an empty tensor": (header(1) + entry(b"x", (4, 0)), r"got 'x' of shape \(0, 4\)"),
    "2⁶³ elements": (header(1) + entry(b"x", (2**63,)) + bytes(99), "got 'x' at bytes"),
    "a product that overflows": (header(1) + entry(b"x", (2**32, 2**32, 4)) + bytes(99), "got 'x' at bytes"),
    "an offset of 2⁶⁴ − 32": (header(1) + entry(b"x", (4,), 0, 2**64 - 32) + bytes(99), "got 'x' at bytes"),
    "an odd offset": (header(1) + entry(b"x", (4,), 0, 3) + bytes(99), "accepted: multiples of 32"),
    "half a block": (header(1) + entry(b"x", (33,), 8) + bytes(999), "rows of whole blocks of 32"),
    "a tensor type": (header(1) + entry(b"x", (4,), 4) + bytes(99), "got 'x' of type 4; accepted: types that gguf"),
    "a tensor twice": (header(2) + entry(b"x", (4,)) + entry(b"x", (4,)) + bytes(99), "got the tensor 'x' twice"),
    "shared bytes": (header(2) + entry(b"x", (9,)) + entry(b"y", (9,)) + bytes(99), "got 'y', which overlaps 'x'"),
    "no architecture": (header(1) + entry(b"../../x", (4,)) + bytes(99), "general.architecture: got None"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    content, message = HOSTILE[name]
    file = tmp_path / "x.gguf"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        open_container(file) if name != "no architecture" else refuse(file, tmp_path / "out")
    code, said = imported(file, tmp_path / "out")
    assert code == 2 and said.startswith(f"tilegrad: {file}: ") and said.count("\n") == 1, said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.gguf"]


def refuse(file: Path, out: Path) -> None:
    from tilegrad.pretrained.gguf.read import import_gguf

    import_gguf(file, out)


def test_a_header_beyond_its_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilegrad.pretrained.gguf.container.MAX_HEADER_BYTES", 4096)
    file = tmp_path / "x.gguf"
    file.write_bytes(header(0, value(b"a", 9, struct.pack("<IQ", 8, 1000) + string(b"") * 1000)))
    with pytest.raises(ValueError, match="got 1,000 strings in 'a'; accepted: as many as the file has room for"):
        open_container(file)
    file.write_bytes(header(0, value(b"a", 9, struct.pack("<IQ", 4, 2000) + bytes(8000))))
    with pytest.raises(ValueError, match="got more than 4,096 bytes before the data, in 'a'; accepted: fewer"):
        open_container(file)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs and links")
def test_a_path_that_is_not_a_file_is_refused(tmp_path: Path) -> None:
    makers: dict[str, Callable[[Path], object]] = {
        "a folder": Path.mkdir,
        "a FIFO or a device": os.mkfifo,
        "a link to nothing": lambda path: path.symlink_to("nowhere"),
    }
    for number, (name, make) in enumerate(makers.items()):
        make(file := tmp_path / f"{number}.gguf")
        code, said = imported(file, tmp_path / "out")
        assert (code, f"{file}: got {name}" in said) == (2, True), said
    code, said = imported(tmp_path / "no.gguf", tmp_path / "out")
    assert code == 2 and "no.gguf: no such file" in said


def test_an_export_writes_no_template_from_outside_the_folder(originals: list[bytes], tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(originals[1])
    assert imported(tmp_path / "m.gguf", tmp_path / "model")[0] == 0
    (tmp_path / "secret").write_text("secret", encoding="utf-8")
    (tmp_path / "model" / "chat_template.jinja").symlink_to("../secret")
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        assert main(["export", str(tmp_path / "model"), str(tmp_path / "out.gguf"), "--gguf"]) == 2
    assert "chat_template.jinja: got a link to" in err.getvalue()
    assert not (tmp_path / "out.gguf").exists()
    settings = tmp_path / "model" / "tokenizer_config.json"
    (tmp_path / "model" / "chat_template.jinja").unlink()
    settings.write_text(json.dumps({"eos_token": [1], "bos_token_id": "x", "pad_token_id": -1}), encoding="utf-8")
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "out.gguf"), "--gguf"]) == 0
    assert "tokenizer.chat_template" not in open_container(tmp_path / "out.gguf").values
