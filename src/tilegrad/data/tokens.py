"""Text → tokens → batches, in an order that depends on the seed and the position alone.

    read_documents(paths) ─ tokenizer.encode ─ write_tokens ┄ tokens.bin ┄ open_tokens ─ split ─ Batches ─ next()

`prepare` is the first half in one call. Of N tokens, window w of T tokens reads tokens[wT : wT + T] and has the tokens one
further on as targets: windows overlap by that one token, so that in an epoch each token but the first is a target once.
The last window may be shorter: it is padded with token 0, and with target −1, which no loss counts.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import mmap
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from ..model.config import LIMITS
from ..text.atomic import write_whole
from ..text.untrusted import decoded, parse_json
from .documents import Tell, quiet, read_documents

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

Tokens = np.ndarray[Any, np.dtype[Any]]  # uint16 or uint32, often a map of a file

_HEADER = struct.Struct("<8sIIQQ32s32s")  # magic, version, bytes per token, tokens, vocab size, two digests
_MAGIC, _VERSION = b"TGTOKENS", 1
_CHUNK = 1 << 22  # tokens looked at together
_LONG = 10_000_000  # characters that take long enough to say so


def default_text() -> Path:
    """The text that ships with the package: Moby-Dick, 1.2 MB, in the public domain."""
    return Path(str(resources.files("tilegrad.data").joinpath("text/moby-dick.txt")))


class Tokenizer(Protocol):
    """Text ↔ tokens below vocab_size. `decode(encode(text)) == text`; where tokens end inside a character, decode puts �."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> Tokens: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def json(self) -> str: ...


@dataclass(frozen=True)
class ByteTokenizer:
    """A token is a byte of UTF-8."""

    vocab_size: int = 256

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint16)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")

    def json(self) -> str:
        return json.dumps({"model": {"type": "bytes"}})


@dataclass(frozen=True)
class BpeTokenizer:
    """Byte-level byte-pair encoding, of Hugging Face `tokenizers`; `json` is that library's own format."""

    inner: HuggingFaceTokenizer
    name: str = "tokenizer"  # the file that it is from

    @cached_property
    def vocab_size(self) -> int:
        return int(self.inner.get_vocab_size())

    def encode(self, text: str) -> Tokens:
        with _named_faults(self.name):
            ids = np.array(self.inner.encode(text).ids, np.int64)
        _check_range(ids, self.vocab_size, self.name)
        return ids.astype(_dtype(self.vocab_size))

    def decode(self, tokens: Sequence[int]) -> str:
        with _named_faults(self.name):
            return str(self.inner.decode(list(tokens), skip_special_tokens=False))

    def json(self) -> str:
        return str(self.inner.to_str())


def train_bpe(text: str, vocab_size: int) -> BpeTokenizer:
    """Learn the merges of `text`: the 256 bytes, and vocab_size − 256 merges. The same text gives the same tokenizer."""
    if vocab_size < 256:
        raise ValueError(f"vocab_size: got {vocab_size}; accepted: at least 256, the bytes, for a byte-level BPE")
    library = _tokenizers()
    inner = library.Tokenizer(library.models.BPE())
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    most = min(vocab_size, 256 + len(text.encode("utf-8")))  # the trainer reserves room for all that it is asked for
    trainer = library.trainers.BpeTrainer(vocab_size=most, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator([text], trainer)
    if inner.get_vocab_size() != vocab_size:
        raise ValueError(
            f"vocab_size: got {vocab_size}; accepted: at most {inner.get_vocab_size()}, which is all that this text makes "
            "(data.bpe_vocab_size), or more text"
        )
    return BpeTokenizer(inner)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer whose `json` is in the file."""
    text = decoded(path)
    content = parse_json(text, str(path))
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict):
        raise ValueError(f"{path}: not a tokenizer; make it again with `prepare`")
    if model.get("type") == "bytes":
        return ByteTokenizer()
    with _named_faults(str(path)):
        found = BpeTokenizer(_tokenizers().Tokenizer.from_str(text), str(path))
    if not 1 <= found.vocab_size <= LIMITS["vocab_size"]:
        raise ValueError(f"{path}: got {found.vocab_size:,} tokens; accepted: 1 … {LIMITS['vocab_size']:,}")
    return found


@contextmanager
def _named_faults(name: str) -> Iterator[None]:
    """What `tokenizers` says of a file that it can't use, with the file's name. It raises Exception itself, and a panic of its
    Rust is no Exception at all."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{name}: is no tokenizer that Hugging Face's tokenizers can use: {error}") from error


def decode_known(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """Text of tokens; a model's vocabulary may be larger than the tokenizer's, and such a token reads �."""
    text, known = "", [token for token in tokens if token < tokenizer.vocab_size]
    if len(known) == len(tokens):
        return tokenizer.decode(tokens)
    for token in tokens:
        text += tokenizer.decode([token]) if token < tokenizer.vocab_size else "�"
    return text


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            "tokenizer: got 'bpe', which needs Hugging Face tokenizers; accepted: 'bytes', or after pip install 'tilegrad[bpe]'"
        ) from error
    return tokenizers


class TokenFileError(ValueError):
    """A token file that cannot be used as it is."""


@dataclass(frozen=True, slots=True)
class TokenFile:
    """Tokens on disk: a header of 96 bytes, then `tokens`, little-endian, uint16 up to a vocabulary of 65536, else uint32."""

    path: Path
    map: mmap.mmap
    tokens: Tokens  # in the map, read-only
    vocab_size: int
    source_sha256: str  # of the text, as UTF-8
    tokenizer_sha256: str  # of the tokenizer's json

    def check_length(self) -> None:
        """OSError where the mapped file has become shorter: reading beyond its end would kill the process (SIGBUS)."""
        found, mapped = self.map.size(), len(self.map)
        if found < mapped:
            raise OSError(
                errno.EIO, f"cut off while it was read, {found} bytes where there were {mapped}", str(self.path)
            )


def write_tokens(path: Path, tokens: Tokens, *, vocab_size: int, source_sha256: str, tokenizer_sha256: str) -> None:
    """Write the file whole or not at all. A token out of range is an error."""
    _check_range(tokens, vocab_size, "tokens")
    dtype = _dtype(vocab_size)
    digests = bytes.fromhex(source_sha256), bytes.fromhex(tokenizer_sha256)
    header = _HEADER.pack(_MAGIC, _VERSION, dtype.itemsize, len(tokens), vocab_size, *digests)
    body = (tokens[i : i + _CHUNK].astype(dtype, copy=False).tobytes() for i in range(0, len(tokens), _CHUNK))
    write_whole(path, (piece for pieces in ((header,), body) for piece in pieces))


def open_tokens(path: Path) -> TokenFile:
    """Map the file. The header, the size, and the range of every token are checked: one pass over the file."""
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
    remedy = "write it again from its text"
    if not head.startswith(_MAGIC):
        raise TokenFileError(f"{path}: begins with {head[:8]!r}, not {_MAGIC!r}: not a token file")
    if len(head) < _HEADER.size:
        raise TokenFileError(f"{path}: {len(head)} bytes are less than a header; {remedy}")
    _, version, itemsize, count, vocab_size, source, tokenizer = _HEADER.unpack(head)
    if version != _VERSION:
        raise TokenFileError(f"{path}: version {version} is not {_VERSION}, the one that this tilegrad reads; {remedy}")
    if not 1 <= vocab_size <= 1 << 32:
        raise TokenFileError(f"{path}: got a vocabulary of {vocab_size}; accepted: 1 … 2³²; {remedy}")
    if itemsize != _dtype(vocab_size).itemsize:
        raise TokenFileError(
            f"{path}: {itemsize} bytes per token do not go with a vocabulary of {vocab_size}; {remedy}"
        )
    expected, found = _HEADER.size + count * itemsize, path.stat().st_size
    if found != expected:
        what = "truncated" if found < expected else "too long"
        raise TokenFileError(f"{path}: {what}, {found} bytes where {count} tokens make {expected}; {remedy}")
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), expected, access=mmap.ACCESS_READ)
    tokens = np.frombuffer(mapped, _dtype(vocab_size), offset=_HEADER.size)
    _check_range(tokens, vocab_size, str(path))
    return TokenFile(path, mapped, tokens, vocab_size, source.hex(), tokenizer.hex())


def _dtype(vocab_size: int) -> np.dtype[Any]:
    if not 1 <= vocab_size <= 1 << 32:
        raise ValueError(f"vocab_size: got {vocab_size}; accepted: 1 … 2³²")
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def _check_range(tokens: Tokens, vocab_size: int, name: str) -> None:
    for begin in range(0, len(tokens), _CHUNK):
        chunk = tokens[begin : begin + _CHUNK]
        if int(chunk.max()) >= vocab_size or int(chunk.min()) < 0:
            at = int(np.argmax((chunk >= vocab_size) | (chunk < 0)))
            raise TokenFileError(
                f"{name}: token {int(chunk[at])} at position {begin + at} is not in the vocabulary of {vocab_size}"
            )


def prepare(
    paths: Sequence[Path], folder: Path, *, tokenizer: str = "bytes", vocab_size: int = 256, text_field: str = "text",
    tell: Tell = quiet,
) -> tuple[TokenFile, Tokenizer]:  # fmt: skip
    """Tokens of the texts in `folder`: tokens.bin, and tokenizer.json beside it.

    tokenizer   "bytes" (vocab_size 256), or "bpe", learnt from these texts and of vocab_size tokens, or a file's name
    text_field  of a line of .jsonl, the field that holds the text
    tell        hears "prepare" while it takes long, and "data" at the end: files, documents, bytes, tokens
    What is there already is used where it comes from the same text by the same tokenizer, and else made again.
    All of the text is in memory while it is encoded.
    """
    given = load_tokenizer(Path(tokenizer)) if tokenizer.endswith(".json") else None
    if given is None and tokenizer not in ("bytes", "bpe"):
        raise ValueError(f"tokenizer: got {tokenizer!r}; accepted: 'bytes', 'bpe', or a tokenizer.json")
    if tokenizer == "bytes" and vocab_size != 256:
        raise ValueError(f"vocab_size: got {vocab_size}; accepted: 256 with the tokenizer 'bytes'")
    read = read_documents(paths, text_field, tell)
    text, source = read.text, _sha256(read.text)
    found = _prepared(folder, source, tokenizer, given.vocab_size if given else vocab_size)
    if found and given and found[1].json() != given.json():
        found = None
    if found is None:
        long = len(text) > _LONG
        if long and tokenizer == "bpe":
            tell("prepare", {"doing": f"learning {vocab_size:,} BPE tokens from {len(text):,} characters"})
        made: Tokenizer = given or (ByteTokenizer() if tokenizer == "bytes" else train_bpe(text, vocab_size))
        if long:
            tell("prepare", {"doing": f"turning {len(text):,} characters into tokens"})
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "tokenizer.json", [made.json().encode("utf-8")])
        write_tokens(
            folder / "tokens.bin",
            made.encode(text),
            vocab_size=made.vocab_size,
            source_sha256=source,
            tokenizer_sha256=_sha256(made.json()),
        )
        found = open_tokens(folder / "tokens.bin"), made
    tell("data", {
        "files": read.files, "documents": read.documents, "left_out": read.left_out, "bytes": len(text.encode("utf-8")),
        "tokens": len(found[0].tokens),
    })  # fmt: skip
    return found


def _prepared(folder: Path, source: str, kind: str, vocab_size: int) -> tuple[TokenFile, Tokenizer] | None:
    """What is in the folder, or None where it is not all there, damaged, or of another text or tokenizer."""
    try:
        file = open_tokens(folder / "tokens.bin")
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    except (FileNotFoundError, TokenFileError, UnicodeDecodeError):
        return None
    if (file.source_sha256, file.vocab_size, file.tokenizer_sha256) != (source, vocab_size, _sha256(text)):
        return None
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    return (file, tokenizer) if isinstance(tokenizer, ByteTokenizer) == (kind == "bytes") else None


def load_prepared(folder: Path) -> tuple[TokenFile, Tokenizer]:
    """What `prepare` left in `folder`, as it is; refused where the tokenizer is not the one that made the tokens."""
    for name in ("tokens.bin", "tokenizer.json"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}: missing; the run's own is needed")
    file = open_tokens(folder / "tokens.bin")
    found = sha256_of(folder / "tokenizer.json")
    if found != file.tokenizer_sha256:
        raise ValueError(
            f"{folder / 'tokenizer.json'}: got a tokenizer of sha256 {found[:12]}…; accepted: the one that made tokens.bin, "
            f"{file.tokenizer_sha256[:12]}…"
        )
    return file, load_tokenizer(folder / "tokenizer.json")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tokens_sha256(tokens: Tokens) -> str:
    return hashlib.sha256(np.ascontiguousarray(tokens).data).hexdigest()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def split(tokens: Tokens, validation_fraction: float) -> tuple[Tokens, Tokens]:
    """(training, validation): the last ⌊fraction · N⌋ tokens are for validation, and nothing trains on them."""
    if not 0 <= validation_fraction < 1:
        raise ValueError(f"validation_fraction: got {validation_fraction}; accepted: at least 0 and less than 1")
    first = len(tokens) - math.floor(len(tokens) * validation_fraction)
    return tokens[:first], tokens[first:]


def split_windows(tokens: Tokens, seq_len: int, validation_fraction: float, *, seed: int = 0) -> tuple[Tokens, Tokens]:
    """(training, validation): numbers of windows of the whole text. ⌊fraction · windows⌋ are for validation, drawn by the
    seed and in the order drawn, so that the first few are from all over the text. A token is a target in one of the two."""
    windows = _count_windows(tokens, seq_len)
    order = np.random.default_rng([seed, 0, 1]).permutation(windows)
    count = math.floor(windows * validation_fraction)
    return np.sort(order[count:]), order[:count]


def unigram_entropy(tokens: Tokens) -> float:
    """−Σ p ln p, in nats: the loss of the best model that looks at no other token."""
    if not len(tokens):
        raise ValueError("tokens: there are none, and no entropy of nothing")
    counts: Tokens = np.zeros(1, np.int64)
    for begin in range(0, len(tokens), _CHUNK):
        more = np.bincount(tokens[begin : begin + _CHUNK], minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
    p = counts[counts > 0] / len(tokens)
    return float(-(p * np.log(p)).sum())


Batch = tuple[torch.Tensor, torch.Tensor]  # tokens, targets (b, T) int64


class Batches:
    """Batches for training, without end: `next()` gives batch_size windows, in an order drawn anew for each epoch.

    The order is one sequence of windows, epoch after epoch, and a batch is the next batch_size of them: a batch may span
    two epochs, and none is smaller. `windows`: the numbers of those it takes, by
    default all. `position` is (epoch, index): how many windows of which epoch are behind.
    """

    def __init__(
        self, tokens: Tokens, batch_size: int, seq_len: int, *, seed: int = 0, windows: Tokens | None = None
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size: got {batch_size}; accepted: at least 1")
        if seed < 0:
            raise ValueError(f"seed: got {seed}; accepted: at least 0")
        self._numbers = np.arange(_count_windows(tokens, seq_len)) if windows is None else windows
        self.windows = len(self._numbers)
        self.batch_size = batch_size
        self.seq_len = seq_len
        self.seed = seed
        self._tokens = tokens
        self._sha256 = tokens_sha256(tokens)
        self._move(0, 0)

    @property
    def position(self) -> tuple[int, int]:
        return self._epoch, self._index

    def next(self) -> Batch:
        return self._read(self._pick())

    def deal(self, count: int, rank: int, world: int) -> list[Batch]:
        """Of the next `count` batches those of one rank, every world-th: only its own are read. The position is one for all
        ranks, so a run goes on with any number of them."""
        picked = [self._pick() for _ in range(count)]
        return [self._read(windows) for windows in picked[rank::world]]

    def _read(self, windows: list[int]) -> Batch:
        return _gather(self._tokens, windows, self.seq_len)

    def _pick(self) -> list[int]:
        """The next batch_size windows."""
        picked: list[int] = []
        while len(picked) < self.batch_size:
            if self._index == self.windows:
                self._move(self._epoch + 1, 0)
            more = self._order[self._index : self._index + self.batch_size - len(picked)]
            picked += more.tolist()
            self._index += len(more)
        return picked

    def state(self) -> dict[str, Any]:
        """Plain JSON from which `restore` goes on exactly: position, and what the order depends on."""
        return {"epoch": self._epoch, "index": self._index, **self._order_depends_on()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. batch_size may be another; tokens, seq_len and seed must be the same."""
        for name, here in self._order_depends_on().items():
            if state[name] != here:
                raise ValueError(
                    f"{name}: the saved position has {state[name]}, this run {here}; the order would differ"
                )
        self._move(state["epoch"], state["index"])

    def _order_depends_on(self) -> dict[str, Any]:
        return {"seed": self.seed, "seq_len": self.seq_len, "tokens_sha256": self._sha256}

    def _move(self, epoch: int, index: int) -> None:
        if epoch < 0 or not 0 <= index <= self.windows:
            raise ValueError(f"position ({epoch}, {index}): an epoch has {self.windows} windows")
        self._epoch, self._index = epoch, index
        self._order = self._numbers[np.random.default_rng([self.seed, epoch]).permutation(self.windows)]


def batches_in_order(
    tokens: Tokens, batch_size: int, seq_len: int, *, most: int | None = None, windows: Tokens | None = None,
    rank: int = 0, world: int = 1,
) -> Iterator[Batch]:  # fmt: skip
    """Every window once, first to last or in the order of `windows`, for evaluation; the last batch may be smaller. `most`:
    no more batches than that, the first of them, so that each evaluation sees the same. Of these, those of one rank."""
    numbers = np.arange(_count_windows(tokens, seq_len)) if windows is None else windows
    for number, begin in enumerate(range(0, len(numbers), batch_size)):
        if number == most:
            return
        if number % world == rank:
            yield _gather(tokens, numbers[begin : begin + batch_size].tolist(), seq_len)


def _count_windows(tokens: Tokens, seq_len: int) -> int:
    if seq_len < 1:
        raise ValueError(f"seq_len: got {seq_len}; accepted: at least 1")
    if len(tokens) < seq_len + 1:
        raise ValueError(
            f"{len(tokens)} tokens are less than one window of seq_len + 1 = {seq_len + 1}; "
            "give more text (of validation: a larger fraction), or a smaller seq_len"
        )
    return -(-(len(tokens) - 1) // seq_len)


def _gather(tokens: Tokens, windows: Sequence[int], seq_len: int) -> Batch:
    inputs = torch.zeros(len(windows), seq_len, dtype=torch.int64)
    targets = torch.full((len(windows), seq_len), -1, dtype=torch.int64)
    for row, window in enumerate(windows):
        piece = torch.from_numpy(tokens[window * seq_len : (window + 1) * seq_len + 1].astype(np.int64))
        inputs[row, : len(piece) - 1] = piece[:-1]
        targets[row, : len(piece) - 1] = piece[1:]
    return inputs, targets
