"""Documents become rows: no token is lost or read twice, targets stay inside a document, and resume is exact."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilegrad.data import packing
from tilegrad.data.batches import Batches, Windows, batches_in_order
from tilegrad.data.document_file import DocumentFile, open_documents, write_documents
from tilegrad.data.packing import Batch, PackedRows, Pieces, TooLong, cut_documents, first_fit, split_pieces
from tilegrad.data.tokens import TokenFileError, open_tokens, write_tokens

ZERO, ONE = "0" * 64, "1" * 64
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def file_of(lengths: list[int], trained: list[bool] | None = None) -> DocumentFile:
    bits = None if trained is None else np.packbits(np.array(trained), bitorder="little")
    return DocumentFile(Path("documents.bin"), None, np.cumsum(lengths), bits)  # type: ignore[arg-type]


def documents_of(batch: Batch, seq_len: int) -> list[tuple[list[int], list[int]]]:
    """(tokens, targets) of each document of a batch without padding, checked as by the engine."""
    assert batch[2] is not None
    tokens, targets, ends = (x.flatten().tolist() for x in (batch[0], batch[1], batch[2]))
    assert ends[0] == 0 and ends[-1] == len(tokens)
    found = []
    for begin, end in pairwise(ends):
        assert begin < end and begin // seq_len == (end - 1) // seq_len, "a document crosses a row"
        if tokens[begin:end] != [0] * (end - begin):
            found.append((tokens[begin:end], targets[begin:end]))
        else:
            assert targets[begin:end] == [-1] * (end - begin) and end % seq_len == 0
    return found


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 24), st.integers(2, 6), st.sampled_from(["cut", "split", "drop"]), st.data())
def test_every_target_is_in_an_epoch_once(
    lengths: list[int], seq_len: int, documents: int, too_long: TooLong, data: st.DataObject
) -> None:
    tokens = np.arange(1, sum(lengths) + 1)
    trained = data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    file = file_of(lengths, trained)
    expected: Counter[tuple[int, int]] = Counter()  # (token, the token that it predicts)
    for end, length in zip(file.ends.tolist(), lengths, strict=True):
        document = list(range(end - length, end))
        pairs = list(pairwise(document))
        if len(pairs) > seq_len:
            pairs = {"cut": pairs[:seq_len], "split": pairs, "drop": []}[too_long]
        expected += Counter((int(tokens[a]), int(tokens[b])) for a, b in pairs if trained[b])
    pieces = cut_documents(file, seq_len, too_long)
    if not expected:
        assert not len(pieces)
        return
    rows = PackedRows(tokens, file, pieces, seq_len, documents)
    batches = Batches(rows, 1, seed=3)
    seen: Counter[tuple[int, int]] = Counter()
    for _ in range(batches.rows_in_epoch):
        found = documents_of(batches.next(), seq_len)
        assert 1 <= len(found) < documents
        for xs, ys in found:
            assert xs == list(range(xs[0], xs[0] + len(xs))), "the tokens of a document follow one another"
            assert len(pieces) == 1 or any(y >= 0 for y in ys)
            assert all(y in (-1, x + 1) for x, y in zip(xs, ys, strict=True))
            seen += Counter((x, y) for x, y in zip(xs, ys, strict=True) if y >= 0)
    assert seen == expected
    assert rows.trained_targets() == sum(expected.values())


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.integers(0, 40), st.integers(1, 3), st.sampled_from([0, 2, 5]))
def test_a_resume_at_any_point_gives_the_same_rows(
    lengths: list[int], steps: int, batch_size: int, documents: int
) -> None:
    tokens, file = np.arange(sum(lengths) + 9), file_of([*lengths, 9])
    rows = PackedRows(tokens, file, cut_documents(file, 16, "split"), 16, documents)
    whole = Batches(rows, batch_size, seed=5)
    for _ in range(steps):
        whole.next()
    resumed = Batches(rows, batch_size, seed=5)
    resumed.restore(json.loads(json.dumps(whole.state())))
    assert resumed.position == whole.position
    for _ in range(12):
        for a, b in zip(whole.next(), resumed.next(), strict=True):
            assert a is b is None or (a is not None and b is not None and torch.equal(a, b))
    assert resumed.position == whole.position


def test_rows_are_filled_first_fit_and_closed_when_full() -> None:
    assert first_fit(np.array([5, 4, 3, 5, 2]), 8, 9) == [[0, 2], [1, 4], [3]]
    assert first_fit(np.array([5, 4, 3, 4, 2, 6]), 8, 9) == [[0, 2], [1, 3], [4, 5]]
    assert first_fit(np.array([1, 1, 1, 1, 1]), 8, 2) == [[0, 1], [2, 3], [4]]
    assert first_fit(np.array([8, 8]), 8, 9) == [[0], [1]]


def test_the_oldest_open_row_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "OPEN", 2)
    assert first_fit(np.array([6, 6, 6, 2]), 8, 9) == [[0], [1, 3], [2]], "row 0 has room and is closed"


def test_the_example_of_the_docstring_is_right() -> None:
    file = file_of([4, 3], [False, True, True, True, False, True, False])
    tokens, targets, ends = PackedRows(
        np.arange(10, 17), file, Pieces(np.array([0, 4]), np.array([3, 2])), 7, 3
    ).gather([np.array([0, 1])])
    assert tokens.tolist() == [[10, 11, 12, 14, 15, 0, 0]]
    assert targets.tolist() == [[11, 12, 13, 15, -1, -1, -1]]
    assert ends is not None and ends.tolist() == [0, 3, 5, 7] and ends.dtype == torch.int32


def test_without_packing_each_document_has_a_row() -> None:
    file = file_of([4, 3, 2])
    rows = PackedRows(np.arange(1, 10), file, cut_documents(file, 4, "cut"), 4, 0)
    ((tokens, targets, ends),) = batches_in_order(rows, 3)
    assert tokens.tolist() == [[1, 2, 3, 0], [5, 6, 0, 0], [8, 0, 0, 0]] and ends is None
    assert targets.tolist() == [[2, 3, 4, -1], [6, 7, -1, -1], [9, -1, -1, -1]]


def test_each_epoch_and_each_seed_has_an_order_and_ranks_share_a_step() -> None:
    file = file_of([5] * 40)
    rows = PackedRows(np.arange(1, 201), file, cut_documents(file, 16, "cut"), 16, 8)

    def epoch(seed: int, number: int) -> list[list[int]]:
        return [row.tolist() for row in rows.order(seed, number)]

    assert epoch(1, 0) == epoch(1, 0) and len({str(epoch(*at)) for at in ((1, 0), (1, 1), (2, 0))}) == 3
    alone, ranks = Batches(rows, 2, seed=1), [Batches(rows, 2, seed=1) for _ in range(2)]
    whole = [alone.next() for _ in range(4)]
    shares = [batches.deal(4, rank, 2) for rank, batches in enumerate(ranks)]
    for i, batch in enumerate(whole):
        assert all(torch.equal(a, b) for a, b in zip(batch, shares[i % 2][i // 2], strict=True) if a is not None)  # type: ignore[arg-type]
    assert ranks[0].position == ranks[1].position == alone.position


@pytest.mark.parametrize("documents", [8, 0, None])
def test_the_count_of_tokens_leaves_padding_out(documents: int | None) -> None:
    file = file_of([5, 9, 3, 12, 7, 2, 6])
    tokens = np.arange(1, 45)  # 0 is padding only
    pieces = cut_documents(file, 8, "cut")
    rows = Windows(tokens, 8) if documents is None else PackedRows(tokens, file, pieces, 8, documents)
    batches, read = Batches(rows, 3, seed=1), 0
    for _ in range(9):
        state = batches.state()
        read += sum(int((inputs > 0).sum()) for inputs, _, _ in batches.deal(2, 0, 1))
        assert batches.tokens_read == read
        again = Batches(rows, 3, seed=1)
        again.restore(state)
        assert again.deal(2, 1, 2) and again.tokens_read == read, "the same on every rank, and after a resume"
    assert batches.position[0] > 2, "several epochs"


def test_cut_and_dropped_documents_are_counted_and_bad_options_are_refused_by_name() -> None:
    file = file_of([9, 3, 12, 1], [False] * 8 + [True] + [True] * 16)
    cut = cut_documents(file, 5, "cut")
    assert (len(cut), cut.cut, cut.cut_tokens, cut.dropped, cut.untrained) == (2, 2, 3 + 6, 0, 2)
    dropped = cut_documents(file, 5, "drop")
    assert (len(dropped), dropped.cut, dropped.dropped, dropped.untrained) == (1, 0, 2, 1)
    assert cut_documents(file, 5, "split").length.tolist() == [3, 2, 5, 5, 1]
    with pytest.raises(
        ValueError, match=r"too_long: got 2 documents longer than seq_len, 5; the longest is document 3 with 12"
    ):
        cut_documents(file, 5, "refuse")
    assert len(cut_documents(file, 11, "refuse")) == 3
    with pytest.raises(ValueError, match="files: got no document with a target"):
        PackedRows(np.arange(25), file, Pieces(np.zeros(0, np.int64), np.zeros(0, np.int64)), 5, 2)


@pytest.mark.parametrize("seed", [None, 0, 7])
def test_equal_documents_are_never_in_both_parts(seed: int | None) -> None:
    tokens = np.concatenate([np.full(4, i % 12) for i in range(60)])  # each document occurs five times
    pieces = cut_documents(file_of([4] * 60), 8, "cut")
    training, validation = split_pieces(tokens, pieces, 0.2, seed=seed)
    assert sorted([*training, *validation]) == list(range(60)) and len(validation) == 10
    assert not {*(training % 12).tolist()} & {*(validation % 12).tolist()}
    unlike = np.arange(240)
    training, validation = split_pieces(unlike, pieces, 0.2, seed=seed)
    assert len(validation) == 12 and (seed is not None or validation.tolist() == list(range(48, 60)))
    assert len(split_pieces(unlike, pieces, 0.0, seed=seed)[1]) == 0


def written(folder: Path, *, mask: bool = True) -> Path:
    write_tokens(folder / "tokens.bin", [np.arange(9)], vocab_size=9, source_sha256=ZERO, tokenizer_sha256=ONE)
    trained = np.array([0, 1, 1, 0, 0, 1, 0, 0, 1], np.bool_) if mask else None
    path = folder / "documents.bin"
    write_documents(path, np.array([3, 5, 9]), trained, source_sha256=ZERO, tokenizer_sha256=ONE)
    return path


@pytest.mark.parametrize("mask", [True, False])
def test_a_document_file_is_read_as_it_was_written(mask: bool, tmp_path: Path) -> None:
    path = written(tmp_path, mask=mask)
    file = open_documents(path, open_tokens(tmp_path / "tokens.bin"))
    assert file.ends.tolist() == [3, 5, 9] and path.stat().st_size == 128 + 24 + 2 * mask
    expected = [False, True, True, False, False, True, False, False, True] if mask else [True] * 9
    for begin in range(9):
        for end in range(begin, 10):
            assert file.trained(begin, end).tolist() == expected[begin:end]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda whole: whole[:-1], "got 153 bytes, but 3 documents of 9 tokens need 154"),
        (lambda whole: whole + b"\0", "got 155 bytes"),
        (lambda whole: whole[:90], "ends in its header"),
        (lambda _whole: b"", "not a file of documents"),
        (lambda whole: b"X" + whole[1:], "not a file of documents"),
        (lambda whole: whole[:8] + b"\2" + whole[9:], "got version 2; accepted: version 1"),
        (lambda whole: whole[:40] + b"\1" + whole[41:], "belongs to other tokens"),
        (lambda whole: whole[:-1] + b"\0", "does not have the digest"),
    ],
)
def test_damaged_document_files_are_named(damage: Callable[[bytes], bytes], words: str, tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(TokenFileError, match=words) as caught:
        open_documents(path, open_tokens(tmp_path / "tokens.bin"))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("ends", [[0, 5, 9], [3, 3, 9], [5, 3, 9], [3, 5, 8]])
def test_ends_that_do_not_increase_are_refused(ends: list[int], tmp_path: Path) -> None:
    path = written(tmp_path, mask=False)
    write_documents(path, np.array(ends), None, source_sha256=ZERO, tokenizer_sha256=ONE)
    with pytest.raises(TokenFileError, match=r"do not rise from 1 to 9|belongs to other tokens"):
        open_documents(path, open_tokens(tmp_path / "tokens.bin"))
