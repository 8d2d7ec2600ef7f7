"""Text becomes tokens and tokens become batches. Errors name what is wrong with a file."""

from __future__ import annotations

import builtins
import codecs
import gzip
import hashlib
import io
import json
import math
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tilegrad.data.batches import Batches, Windows, batches_in_order, split, split_windows
from tilegrad.data.documents import default_text, find_format, read_documents
from tilegrad.data.prepare import prepare
from tilegrad.data.tokenizer import ByteTokenizer, load_tokenizer, train_bpe
from tilegrad.data.tokens import TokenFileError, open_tokens, token_dtype, unigram_entropy, write_tokens

ZERO = "0" * 64


def write(path: Path, tokens: list[int], vocab_size: int) -> Path:
    write_tokens(path, [np.array(tokens)], vocab_size=vocab_size, source_sha256=ZERO, tokenizer_sha256=ZERO)
    return path


def test_the_bundled_text_is_the_one_that_its_notice_describes() -> None:
    whole = default_text().read_bytes()
    assert len(whole) > 1_000_000
    assert whole.startswith(b"CHAPTER 1. Loomings.") and b"Call me Ishmael." in whole[:100]
    readme = default_text().with_name("README.md").read_text(encoding="utf-8")
    assert hashlib.sha256(whole).hexdigest() in readme and f"{len(whole):,} bytes" in readme
    licence = default_text().with_name("LICENSE.txt").read_text(encoding="utf-8")
    assert "Creative Commons Zero v1.0 Universal" in licence
    assert "Open Data Commons Public Domain Dedication & License 1.0" in licence


def test_files_are_joined_in_order_and_unchanged(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("one\r\n–".encode())
    (tmp_path / "b").write_bytes(b"two\n")
    assert "".join(read_documents([tmp_path / "a", tmp_path / "b"]).text()) == "one\r\n–two\n"


def test_the_error_for_bad_text_names_the_byte(tmp_path: Path) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes("naïve ".encode() + b"na\xefve")
    with pytest.raises(ValueError, match=r"bad\.txt: is not UTF-8 at byte 9, 0xef"):
        read_documents([bad])
    with pytest.raises(FileNotFoundError, match=r"none\.txt: no such text file"):
        read_documents([tmp_path / "none.txt"])


def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path: Path) -> None:
    text, lines, bad = tmp_path / "a.txt", tmp_path / "a.jsonl", tmp_path / "bad.txt"
    text.write_bytes(codecs.BOM_UTF8 + "one\ufeff".encode())
    lines.write_bytes(codecs.BOM_UTF8 + b'{"text": "two"}\n')
    assert "".join(read_documents([text]).text()) == "one\ufeff"
    assert "".join(read_documents([lines]).text()) == "two\n\n"
    lines.write_bytes(codecs.BOM_UTF8 + b'{"messages": []}\n')
    assert find_format([lines], "text") == "messages"
    bad.write_bytes(codecs.BOM_UTF8 + b"na\xefve")
    with pytest.raises(ValueError, match=r"bad\.txt: is not UTF-8 at byte 5, 0xef"):
        read_documents([bad])


def test_a_folder_is_read_in_order_with_lines_and_gzip(tmp_path: Path) -> None:
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / "b" / "deep" / "x.txt.gz").write_bytes(gzip.compress("zip–ped ".encode()))
    (tmp_path / "b" / "c.jsonl").write_text('{"text": "one", "id": 1}\n\n{"text": "two\\n"}\n', encoding="utf-8")
    (tmp_path / "a.md").write_text("# first ", encoding="utf-8")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    read = read_documents([tmp_path])
    assert "".join(read.text()) == "# first one\n\ntwo\n\n\nzip–ped "
    assert (len(read.files), len(read.lengths), read.left_out) == (3, 4, 1)
    (tmp_path / "b" / "c.jsonl").write_text('{"story": "one"}', encoding="utf-8")
    assert "".join(read_documents([tmp_path / "b" / "c.jsonl"], "story").text()) == "one\n\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": ', r"a\.jsonl, line 2: is not JSON"),
        (
            "a.jsonl",
            b'\n{"body": "x"}',
            r"a\.jsonl, line 2: got the keys 'body'; accepted: an object with a string in 'text'",
        ),
        ("a.jsonl", b'["x"]', r"a\.jsonl, line 1: got list; accepted: an object"),
        ("a.jsonl.gz", gzip.compress(b"x", mtime=0), r"a\.jsonl\.gz, line 1: is not JSON"),
        (
            "a.json",
            b'[{"text": "x"}]',
            r"a\.json: got a file of kind '\.json'; accepted: \.txt, .*\.jsonl, one of these with",
        ),
        ("a.parquet", b"PAR1", r"a\.parquet: got a file of kind '\.parquet'"),
        ("a.zip", b"PK", r"a\.zip: got a file of kind '\.zip'"),
        ("a.tar.gz", gzip.compress(b"x", mtime=0), r"a\.tar\.gz: got a file of kind '\.tar\.gz'"),
        ("a.txt", b"ab\0c", r"a\.txt: got a zero byte at position 2"),
        ("a.txt.gz", b"plain", r"a\.txt\.gz: is not gzip, or is damaged"),
        ("a.txt.gz", gzip.compress(b"plain", mtime=0)[:-4], r"a\.txt\.gz: is not gzip, or is damaged"),
        ("folder/a.png", b"x", r"folder: got a folder without text files; accepted: a folder with \.txt"),
    ],
)
def test_files_of_an_unknown_format_are_refused_by_name(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_documents([file if file.parent == tmp_path else file.parent])


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("read", [read_documents, lambda paths: find_format(paths, "text")])
def test_an_error_of_the_disk_is_not_reported_as_a_damaged_gzip(
    name: str, read: Callable[[list[Path]], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(io.BytesIO):
        def read(self, _size: int | None = -1) -> bytes:
            raise OSError(5, "Input/output error")

        readline = read

    (tmp_path / name).write_bytes(b"{}")
    plain = Path.open
    monkeypatch.setattr(Path, "open", lambda file, *a, **k: Broken() if file.name == name else plain(file, *a, **k))
    monkeypatch.setattr(gzip, "open", lambda *_: Broken())
    with pytest.raises(ValueError, match=rf"{name}: can't be read: Input/output error"):
        read([tmp_path / name])


def test_prepare_reports_the_data_and_a_slow_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilegrad.data.prepare._LONG", 5)
    (tmp_path / "a.txt").write_text("na–ve", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n{"text": "y"}\n', encoding="utf-8")
    told: list[tuple[str, dict[str, object]]] = []
    prepare([tmp_path], tmp_path / "data", show=lambda event, numbers: told.append((event, numbers)))
    assert told == [
        ("prepare", {"doing": "turning 11 characters into tokens"}),
        ("data", {"files": 2, "documents": 3, "left_out": 0, "bytes": 13, "tokens": 13}),
    ]


def test_the_tokenizer_of_bytes_has_a_token_for_each_byte() -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode("aé–")
    assert tokens.dtype == np.uint16 and tokens.tolist() == [97, 0xC3, 0xA9, 0xE2, 0x80, 0x93]
    assert tokenizer.decode(tokens.tolist()) == "aé–"
    assert tokenizer.decode(tokens.tolist()[:-1]) == "aé�"


def test_bpe_is_lossless_deterministic_and_saved(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    text = default_text().read_text(encoding="utf-8")[:100_000]
    first, second = train_bpe(text, 400), train_bpe(text, 400)
    assert first.json() == second.json()
    assert first.vocab_size == 400
    strange = text[:1000] + "  naïve \n\n\t 日本語 🐋"
    assert first.decode(first.encode(strange).tolist()) == strange
    assert len(first.encode(text)) < 0.7 * len(text)
    (tmp_path / "tokenizer.json").write_text(first.json(), encoding="utf-8")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert np.array_equal(loaded.encode(strange), first.encode(strange))
    with pytest.raises(ValueError, match="vocab_size: got 255; accepted: at least 256"):
        train_bpe(text, 255)
    with pytest.raises(
        ValueError, match=r"vocab_size: got 5000; accepted: at most \d+, the number of tokens in this text"
    ):
        train_bpe("a short text " * 9, 5000)


@pytest.mark.parametrize("size", [1, 5, 40])
def test_the_tokens_and_merges_of_a_text_do_not_depend_on_its_pieces(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """White space, contractions, digits, other alphabets and a special token are where a boundary could move tokens."""
    pytest.importorskip("tokenizers")
    monkeypatch.setattr("tilegrad.data.tokenizer._PIECE", size)
    plain = default_text().read_text(encoding="utf-8")[:20_000]
    strange = [
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "\u3000",
        "\x1c",
        "\x85",
        "'s",
        "'",
        "we'll",
        "12",
        "é",
        "日本。",
        "🐋",
        "a",
        "-",
    ]
    strange.append("<|endoftext|>")
    picked = np.random.default_rng(size).integers(0, len(strange), 4000)
    text = plain + "".join(strange[i] for i in picked)
    whole = train_bpe([text], 500, eos=True)
    pieces = [text[begin : begin + 7] for begin in range(0, len(text), 7)]
    assert train_bpe(pieces, 500, eos=True).json() == whole.json()
    assert np.concatenate([*whole.encode_pieces(pieces)]).tolist() == whole.encode(text).tolist()
    count = sum(1 for _ in whole.encode_pieces(pieces))
    assert count > 50, "the text was cut"


def test_bpe_without_its_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = builtins.__import__

    def refuse(name: str, *rest: object, **named: object) -> object:
        if name == "tokenizers":
            raise ImportError(name)
        return genuine(name, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"pip install 'tilegrad\[bpe\]'"):
        train_bpe("text", 256)


@pytest.mark.parametrize(("vocab_size", "itemsize"), [(256, 2), (65536, 2), (65537, 4), (1 << 32, 4)])
def test_a_token_file_is_read_as_it_was_written(tmp_path: Path, vocab_size: int, itemsize: int) -> None:
    tokens = [0, vocab_size - 1, 7, 8, 9]
    path = write(tmp_path / "tokens.bin", tokens, vocab_size)
    file = open_tokens(path)
    assert file.tokens.tolist() == tokens and file.tokens.dtype.itemsize == itemsize
    assert not file.tokens.flags.writeable and len(file.map) == path.stat().st_size
    assert (file.vocab_size, file.source_sha256) == (vocab_size, ZERO)
    assert path.stat().st_size == 96 + itemsize * len(tokens)
    assert open_tokens(write(path, [], vocab_size)).tokens.tolist() == []


def patch(at: int, format: str, value: int | bytes) -> Callable[[bytes], bytes]:
    piece = struct.pack(format, value)
    return lambda whole: whole[:at] + piece + whole[at + len(piece) :]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda whole: whole[:-1], "truncated: got 101 bytes, but 3 tokens need 102"),
        (lambda whole: whole + b"\0", "too long: got 103 bytes, but 3 tokens need 102"),
        (lambda whole: whole[:50], "50 bytes are less than a header"),
        (lambda _whole: b"", "not a token file"),
        (patch(0, "8s", b"TGTOKENX"), "begins with b'TGTOKENX'"),
        (patch(8, "<I", 2), "got version 2; accepted: version 1"),
        (patch(12, "<I", 4), "4 bytes per token do not match a vocabulary of 10"),
        (patch(98, "<H", 10), "token 10 at position 1 is not in the vocabulary of 10"),
    ],
)
def test_damaged_token_files_are_named(tmp_path: Path, damage: Callable[[bytes], bytes], words: str) -> None:
    path = write(tmp_path / "tokens.bin", [1, 2, 3], 10)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(TokenFileError, match=words) as caught:
        open_tokens(path)
    assert str(path) in str(caught.value)


def test_a_token_out_of_range_is_named_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilegrad.data.tokens._CHUNK", 4)
    with pytest.raises(TokenFileError, match="token 10 at position 6 is not in the vocabulary of 10"):
        write(tmp_path / "tokens.bin", [1, 2, 3, 4, 5, 6, 10, 8, 11], 10)
    with pytest.raises(TokenFileError, match="token -1 at position 5"):
        write(tmp_path / "tokens.bin", [1, 2, 3, 4, 5, -1], 10)
    assert list(tmp_path.iterdir()) == []


def test_the_vocabulary_decides_the_bytes_of_a_token() -> None:
    assert [token_dtype(n).itemsize for n in (1, 1 << 16, (1 << 16) + 1, 1 << 32)] == [2, 2, 4, 4]
    for n in (0, (1 << 32) + 1):
        with pytest.raises(ValueError, match=f"vocab_size: got {n}; accepted: 1 … 2³²"):
            token_dtype(n)


def test_a_process_that_has_the_old_file_open_keeps_it(tmp_path: Path) -> None:
    old = open_tokens(write(tmp_path / "tokens.bin", [1, 2, 3], 10))
    new = open_tokens(write(tmp_path / "tokens.bin", [4, 5, 6], 10))
    assert (old.tokens.tolist(), new.tokens.tolist()) == ([1, 2, 3], [4, 5, 6])
    assert [p.name for p in tmp_path.iterdir()] == ["tokens.bin"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "tokens.bin", [1, 2, 3], 10)

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(path, [4, 5, 6, 7], 10)
    assert open_tokens(path).tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_prepare_uses_existing_files_only_if_they_fit(tmp_path: Path, kind: str) -> None:
    if kind == "bpe":
        pytest.importorskip("tokenizers")
    vocab_size = 256 if kind == "bytes" else 270
    text = tmp_path / "text.txt"
    text.write_text("the whale, the white whale, the whale that was white; " * 40, encoding="utf-8")
    folder = tmp_path / "data"

    def made(**change: object) -> tuple[int, str]:
        file, tokenizer = prepare([text], folder, **({"tokenizer": kind, "vocab_size": vocab_size} | change))  # type: ignore[arg-type]
        assert tokenizer.decode(file.tokens.tolist()) == text.read_text(encoding="utf-8")
        assert file.vocab_size == tokenizer.vocab_size
        assert file.source_sha256 == hashlib.sha256(text.read_bytes()).hexdigest()
        return file.path.stat().st_mtime_ns, (folder / "tokenizer.json").read_text(encoding="utf-8")

    first = made()
    assert made() == first
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert made()[1] == first[1]
    tokens = (folder / "tokens.bin").read_bytes()
    (folder / "tokens.bin").write_bytes(tokens[:-3])
    assert made()[1] == first[1] and (folder / "tokens.bin").read_bytes() == tokens
    if kind == "bpe":
        assert made(vocab_size=265)[1] != first[1]
        assert json.loads(made(tokenizer="bytes", vocab_size=256)[1]) == {"model": {"type": "bytes"}}
    text.write_text("another text of whales " * 30, encoding="utf-8")
    again = made(vocab_size=256)
    assert again[0] != first[0]


def test_a_text_that_changes_while_it_is_prepared_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Call me Ishmael.", encoding="utf-8")
    read = read_documents([tmp_path / "a.txt"])
    (tmp_path / "a.txt").write_text("Call me Queequeg", encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"a\.txt: got another text than at the first read; accepted: files that nothing"
    ):
        "".join(read.text())


def test_prepare_refuses_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tokenizer: got 'words'; accepted: 'bytes', 'bpe', or"):
        prepare([default_text()], tmp_path, tokenizer="words")
    with pytest.raises(ValueError, match="vocab_size: got 300; accepted: 256 with the tokenizer 'bytes'"):
        prepare([default_text()], tmp_path, vocab_size=300)


def test_the_split_gives_each_part_its_share() -> None:
    tokens = np.arange(103)
    train, validation = split(tokens, 0.1)
    assert train.tolist() == list(range(93)) and validation.tolist() == list(range(93, 103))
    train, validation = split(tokens, 0.0)
    assert len(train) == 103 and len(validation) == 0
    with pytest.raises(ValueError, match="validation_fraction: got 1"):
        split(tokens, 1)


def test_validation_windows_are_drawn_across_the_text_and_never_trained_on() -> None:
    tokens = np.arange(10_001)
    train, validation = split_windows(tokens, 10, 0.1, seed=3)
    assert len(train) == 900 and len(validation) == 100 and not set(train) & set(validation)
    # windows of each quarter, in the first twenty
    assert {number // 250 for number in validation[:20].tolist()} == {0, 1, 2, 3}
    assert [len(part) for part in split_windows(tokens, 10, 0.0)] == [1000, 0]
    assert not np.array_equal(validation, split_windows(tokens, 10, 0.1, seed=4)[1])
    assert np.array_equal(validation, split_windows(tokens, 10, 0.1, seed=3)[1])
    batches = Batches(Windows(tokens, 10, train), 9, seed=3)
    learned = [target for _ in range(100) for target in batches.next()[1].flatten().tolist()]
    held_out = batches_in_order(Windows(tokens, 10, validation), 7)
    seen = [y for _, targets, _ in held_out for y in targets.flatten().tolist()]
    assert sorted(learned + seen) == list(range(1, 10_001))
    assert batches.position == (0, 900)


def test_the_unigram_entropy_equals_its_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unigram_entropy(np.array([5, 5, 5])) == 0.0
    assert unigram_entropy(np.arange(64)) == pytest.approx(math.log(64), rel=1e-12)
    monkeypatch.setattr("tilegrad.data.tokens._CHUNK", 7)
    tokens = np.random.default_rng(0).integers(0, 9, 100).astype(np.uint16)
    p = [n / 100 for n in Counter(tokens.tolist()).values()]
    assert unigram_entropy(tokens) == pytest.approx(-sum(q * math.log(q) for q in p), rel=1e-12)
    with pytest.raises(ValueError, match="tokens: got none; accepted: at least one token"):
        unigram_entropy(np.array([], np.uint16))


def epoch(batches: Batches) -> list[int]:
    """Every target that one epoch counts."""
    begin, seen = batches.position[0], []
    while batches.position[0] == begin and batches.position[1] < batches.rows_in_epoch:
        tokens, targets, _ = batches.next()
        assert tokens.shape == targets.shape and tokens.dtype == targets.dtype == torch.int64
        known = targets >= 0
        assert torch.equal(tokens[known] + 1, targets[known])
        assert (tokens[~known] == 0).all() and (targets[~known] == -1).all()
        seen += targets[known].tolist()
    return seen


@pytest.mark.parametrize("count", [33, 40, 41, 64, 65])
def test_in_an_epoch_each_token_but_the_first_is_a_target_once(count: int) -> None:
    batches = Batches(Windows(np.arange(count), 8), 1, seed=3)
    first, second = epoch(batches), []
    while batches.position[0] == 0 or batches.position[1] < batches.rows_in_epoch:
        targets = batches.next()[1]
        second += targets[targets >= 0].tolist()
    assert sorted(first) == sorted(second) == list(range(1, count))
    assert first != second, "an order for each epoch"
    assert first != epoch(Batches(Windows(np.arange(count), 8), 1, seed=4)), "an order for each seed"
    assert first == epoch(Batches(Windows(np.arange(count), 8), 1, seed=3))


def test_the_order_does_not_depend_on_the_batch_size() -> None:
    tokens = np.arange(100)
    one, three = Batches(Windows(tokens, 8), 1), Batches(Windows(tokens, 8), 3)
    rows = torch.cat([one.next()[0] for _ in range(39)])
    assert torch.equal(rows, torch.cat([three.next()[0] for _ in range(13)]))  # 13 windows: batches span epochs
    assert one.position == three.position == (2, 13)


def test_resumed_batches_are_the_same() -> None:
    tokens = np.random.default_rng(1).integers(0, 256, 1000).astype(np.uint16)
    for steps in (0, 1, 7, 8, 50):
        whole = Batches(Windows(tokens, 16), 4, seed=5)
        for _ in range(steps):
            whole.next()
        state = json.loads(json.dumps(whole.state()))
        resumed = Batches(Windows(tokens, 16), 4, seed=5)
        resumed.restore(state)
        assert resumed.position == whole.position
        for _ in range(40):
            for a, b in zip(whole.next()[:2], resumed.next()[:2], strict=True):
                assert torch.equal(a, b)


def test_a_position_of_another_run_is_refused() -> None:
    tokens = np.arange(100)
    state = Batches(Windows(tokens, 8), 4, seed=5).state()
    with pytest.raises(ValueError, match="seed: got 6; accepted: 5, as in the saved position"):
        Batches(Windows(tokens, 8), 4, seed=6).restore(state)
    with pytest.raises(ValueError, match="seq_len: got 16; accepted: 8, as in the saved position"):
        Batches(Windows(tokens, 16), 4, seed=5).restore(state)
    other = tokens.copy()
    other[50] = 0
    with pytest.raises(ValueError, match="tokens_sha256"):
        Batches(Windows(other, 8), 4, seed=5).restore(state)
    with pytest.raises(ValueError, match=r"position: got \(0, 14\); accepted: epoch ≥ 0, rows 0 … 13"):
        Batches(Windows(tokens, 8), 4, seed=5).restore(state | {"index": 14})


def test_a_text_shorter_than_a_window_is_an_error_with_the_remedy() -> None:
    with pytest.raises(
        ValueError, match=r"tokens: got 8; accepted: at least one window, seq_len \+ 1 = 9; give more text"
    ):
        Batches(Windows(np.arange(8), 8), 1)
    with pytest.raises(ValueError, match="tokens: got 0; accepted: at least one window"):
        next(batches_in_order(Windows(np.arange(0), 8), 1))
    assert Batches(Windows(np.arange(9), 8), 1).rows_in_epoch == 1
    with pytest.raises(ValueError, match="batch_size: got 0"):
        Batches(Windows(np.arange(9), 8), 0)
    with pytest.raises(ValueError, match="seq_len: got 0"):
        Batches(Windows(np.arange(9), 0), 1)


def test_evaluation_reads_every_window_in_order() -> None:
    tokens = np.arange(100)
    batches = list(batches_in_order(Windows(tokens, 8), 5))
    assert [len(b[0]) for b in batches] == [5, 5, 3]
    targets = torch.cat([b[1] for b in batches]).flatten()
    assert targets[targets >= 0].tolist() == list(range(1, 100))
    assert (targets == -1).sum() == 13 * 8 - 99
    first = list(batches_in_order(Windows(tokens, 8), 5, most=2))
    assert len(first) == 2 and torch.equal(first[1][0], batches[1][0])
