"""Text ↔ tokens: bytes, or byte-pair encoding (BPE) by Hugging Face `tokenizers`.

EOS, the token that ends a document, comes from the first of these files that names it:

    tokenizer_config.json      the key eos_token: a text
    generation_config.json     the key eos_token_id: an id, or a list whose first id is EOS
    config.json                the key eos_token_id, in the same form
    tokenizer.json             a special token with a well-known name, such as <|endoftext|>

The byte tokenizer has no EOS. A BPE tokenizer that `train_bpe` trained on several documents has <|endoftext|>.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ..memory.managed.pressure import memory_limit
from ..memory.page import human
from ..model.config import LIMITS
from ..text.untrusted import decoded, file_in, parse_json, read_json, shown
from .chat_template import CONFIG, read_tokenizer_config, token_text
from .tokens import Tokens, check_range, token_dtype

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")  # the token of a byte in SentencePiece
# `TextStream` decodes a new token together with at most this many earlier ones, because some decoders strip the space of a
# first token.
_CONTEXT = 8
_PIECE, _TOGETHER = 1 << 16, 16  # characters of a piece that is encoded by itself; how many pieces one call encodes
_SPACE, _WORD_END = re.compile(r"\s"), re.compile(r"\S(?=[ \n])")

END_OF_TEXT = "<|endoftext|>"  # EOS of a BPE tokenizer that `train_bpe` trained
_KNOWN_EOS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")


@dataclass(frozen=True, slots=True)
class Encoded:
    tokens: Tokens
    starts: Tokens  # index of the first character of each token
    ends: Tokens  # index after the last character of each token; both are 0 for a token outside the text, such as BOS
    special: npt.NDArray[np.bool_]  # whether each token is special, such as EOS


class Tokenizer(Protocol):
    """Text ↔ tokens below vocab_size. `decode(encode(text)) == text`; an incomplete character decodes to �."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> Tokens: ...

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[Tokens]:
        """The tokens of one text, which comes in pieces."""

    def decode(self, tokens: Sequence[int]) -> str: ...

    def json(self) -> str: ...

    def byte_lengths(self) -> Tokens | None:
        """How many bytes the text of each token has, 0 for a special token; None if the tokenizer does not determine it."""

    def encode_all(self, texts: Sequence[str]) -> list[Tokens]: ...

    def encode_with_offsets(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Encoded]: ...

    def token_id(self, text: str) -> int | None:
        """The id of the token whose text this is; None if there is no such token."""


@dataclass(frozen=True)
class ByteTokenizer:
    """A tokenizer whose tokens are the bytes of UTF-8."""

    vocab_size: int = 256

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint16)

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[Tokens]:
        return map(self.encode, pieces)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")

    def json(self) -> str:
        return json.dumps({"model": {"type": "bytes"}})

    def byte_lengths(self) -> Tokens:
        return np.ones(self.vocab_size, np.int64)

    def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        return [self.encode(text) for text in texts]

    def encode_with_offsets(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Encoded]:  # noqa: ARG002
        encoded = []
        for text, tokens in zip(texts, self.encode_all(texts), strict=True):
            starts = np.repeat(np.arange(len(text)), [len(c.encode("utf-8")) for c in text])
            encoded.append(Encoded(tokens, starts, starts + 1, np.zeros(len(tokens), np.bool_)))
        return encoded

    def token_id(self, text: str) -> int | None:  # noqa: ARG002
        return None


@dataclass(frozen=True)
class BpeTokenizer:
    """A tokenizer of Hugging Face `tokenizers`, such as byte-level BPE. `json` returns the format of that library."""

    inner: HuggingFaceTokenizer
    name: str = "tokenizer"  # the file from which it was loaded

    @cached_property
    def vocab_size(self) -> int:
        return int(self.inner.get_vocab_size())

    def encode(self, text: str) -> Tokens:
        with _naming(self.name):
            ids = self.inner.encode(text).ids
        return self._checked(ids)

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[Tokens]:
        pieces = _cut(pieces) if self._cuttable else iter([_joined(pieces, self.name)])
        while some := [*islice(pieces, _TOGETHER)]:
            yield from self.encode_all(some)

    @cached_property
    def _cuttable(self) -> bool:
        """Whether the pieces of a text can be encoded one by one. They can if the tokenizer splits text as GPT-2 does, and if
        nothing else reads or changes the text around a split."""
        content = json.loads(self.json())
        split, after = content["pre_tokenizer"] or {}, content["post_processor"] or {}
        return (
            split.get("type") == "ByteLevel"
            and split.get("use_regex", True)
            and not split["add_prefix_space"]
            and content["normalizer"] is None
            and after.get("type", "ByteLevel") == "ByteLevel"
            and not any(
                token["lstrip"] or token["rstrip"] or token["single_word"] or _SPACE.search(token["content"])
                for token in content["added_tokens"]
            )
        )

    def decode(self, tokens: Sequence[int]) -> str:
        with _naming(self.name):
            return str(self.inner.decode(list(tokens), skip_special_tokens=False))

    def json(self) -> str:
        return str(self.inner.to_str())

    def byte_lengths(self) -> Tokens | None:
        """The number of bytes of each token. Byte-level tokens have a character for each byte. SentencePiece tokens have ▁ for
        a space, and <0x0A> for a byte."""
        decoder = json.loads(self.json())["decoder"] or {}
        parts = {part.get("type") for part in decoder.get("decoders", [decoder])}
        if not parts & {"ByteLevel", "ByteFallback", "Metaspace"}:
            return None
        added = self.inner.get_added_tokens_decoder()

        def length(token: int) -> int:
            text = self.inner.id_to_token(token) or ""
            if token in added:
                return 0 if added[token].special else len(text.encode("utf-8"))
            if "ByteLevel" in parts:
                return len(text)
            return 1 if BYTE_TOKEN.fullmatch(text) else len(text.replace("▁", " ").encode("utf-8"))

        return np.array([length(token) for token in range(self.vocab_size)], np.int64)

    def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        with _naming(self.name):
            encodings = self.inner.encode_batch(list(texts))
        return [self._checked(one.ids) for one in encodings]

    def encode_with_offsets(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Encoded]:
        with _naming(self.name):
            encodings = self.inner.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        encoded = []
        for one in encodings:
            starts, ends = np.array(one.offsets, np.int64).reshape(-1, 2).T
            tokens = self._checked(one.ids)
            encoded.append(Encoded(tokens, starts, ends, np.isin(tokens, self._special)))
        return encoded

    def token_id(self, text: str) -> int | None:
        token: int | None = self.inner.token_to_id(text)
        return token

    def _checked(self, ids: Sequence[int]) -> Tokens:
        tokens = np.array(ids, np.int64)
        check_range(tokens, self.vocab_size, self.name)
        return tokens.astype(token_dtype(self.vocab_size))

    @cached_property
    def _special(self) -> Tokens:
        return np.array([n for n, token in self.inner.get_added_tokens_decoder().items() if token.special], np.int64)


def train_bpe(text: Iterable[str], vocab_size: int, *, eos: bool = False) -> BpeTokenizer:
    """Learn vocab_size − 256 merges from `text`, which may come in pieces; the first 256 tokens are the bytes. The same text
    gives the same tokenizer, however the text is cut into pieces. With `eos` the last token is <|endoftext|>, and there is one
    merge fewer."""
    if vocab_size < 256:
        raise ValueError(f"vocab_size: got {vocab_size}; accepted: at least 256, one token for each byte")
    library = _tokenizers()
    inner = library.Tokenizer(library.models.BPE())
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    learned = vocab_size - eos
    # The trainer allocates memory for its whole vocab_size, so `most` is at most what the text can fill.
    most, first_pieces, pieces = 256, [], _cut(text)
    for piece in pieces:
        first_pieces.append(piece)
        most += len(piece.encode("utf-8"))
        if most >= learned:
            break
    most = min(learned, most)
    trainer = library.trainers.BpeTrainer(vocab_size=most, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(chain(first_pieces, pieces), trainer)
    if inner.get_vocab_size() != learned:
        raise ValueError(
            f"vocab_size: got {vocab_size}; accepted: at most {inner.get_vocab_size() + eos}, the number of tokens in this "
            "text; lower data.bpe_vocab_size, or give more text"
        )
    if eos:
        inner.add_special_tokens([END_OF_TEXT])
    return BpeTokenizer(inner)


def _cut(pieces: Iterable[str]) -> Iterator[str]:
    """The same text in pieces of about _PIECE characters, cut where words begin: before white space that follows another
    character. GPT-2 splits the text there, whatever comes before or after."""
    rest = ""
    for piece in pieces:
        rest += piece
        begin = 0
        while found := _WORD_END.search(rest, begin + _PIECE):
            yield rest[begin : found.end()]
            begin = found.end()
        rest = rest[begin:]
    if rest:
        yield rest


def _joined(pieces: Iterable[str], name: str) -> str:
    parts, size = [], 0
    room = (memory_limit(torch.device("cpu")) or sys.maxsize) // 2
    for piece in pieces:
        parts.append(piece)
        size += len(piece)
        if size > room:
            raise ValueError(
                f"{name}: got a text of more than {human(room)}, half of this machine's memory; accepted: shorter documents, "
                "because this tokenizer encodes a document as a whole"
            )
    return "".join(parts)


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer.json that `Tokenizer.json` or Hugging Face wrote."""
    text = decoded(path)
    content = parse_json(text, str(path))
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict):
        raise ValueError(f"{path}: got no object 'model'; accepted: a tokenizer.json of tilegrad or Hugging Face")
    if model.get("type") == "bytes":
        return ByteTokenizer()
    with _naming(str(path)):
        inner = _tokenizers().Tokenizer.from_str(text)
        inner.no_truncation()  # because tokenizer.json may enable truncation and padding, which would change documents
        inner.no_padding()
        tokenizer = BpeTokenizer(inner, str(path))
    if not 1 <= tokenizer.vocab_size <= LIMITS["vocab_size"]:
        raise ValueError(f"{path}: got {tokenizer.vocab_size:,} tokens; accepted: 1 … {LIMITS['vocab_size']:,}")
    return tokenizer


def find_eos(folder: Path, tokenizer: Tokenizer) -> int | None:
    """EOS of the tokenizer in `folder`, from the files that the docstring of this module lists; None if none of them names
    it."""
    if isinstance(tokenizer, ByteTokenizer):
        return None
    text = token_text(read_tokenizer_config(folder), "eos_token")
    if text is not None:
        eos = tokenizer.token_id(text)
        if eos is None:
            raise ValueError(
                f"{folder / CONFIG}: eos_token: got {shown(text)}, which is not in tokenizer.json; accepted: one of its tokens"
            )
        return eos
    listed = _listed_eos(folder, tokenizer)
    if listed:
        return listed[0]
    return next((n for text in _KNOWN_EOS if (n := tokenizer.token_id(text)) is not None), None)


def eos_token_ids(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Every token that ends a text: EOS (`find_eos`), and all tokens that generation_config.json and config.json list, such as
    the token that ends a message."""
    if isinstance(tokenizer, ByteTokenizer):
        return frozenset()
    eos = find_eos(folder, tokenizer)
    return frozenset(_listed_eos(folder, tokenizer)) | (frozenset() if eos is None else {eos})


def _listed_eos(folder: Path, tokenizer: Tokenizer) -> list[int]:
    """eos_token_id of generation_config.json, then of config.json."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        if not (folder / name).exists():
            continue
        file = file_in(folder, name)
        content = read_json(file)
        value = content.get("eos_token_id") if isinstance(content, dict) else None
        for one in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < tokenizer.vocab_size:
                accepted = f"a token of tokenizer.json, 0 … {tokenizer.vocab_size - 1}"
                raise ValueError(f"{file}: eos_token_id: got {shown(one)}; accepted: {accepted}")
            ids.append(one)
    return ids


def decode_known(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """Decode tokens. A model may have more tokens than its tokenizer; the extra tokens decode to �."""
    if all(token < tokenizer.vocab_size for token in tokens):
        return tokenizer.decode(tokens)
    return "".join(tokenizer.decode([token]) if token < tokenizer.vocab_size else "�" for token in tokens)


class TextStream:
    """Decodes tokens one by one. `add` returns the new text that later tokens cannot change, and `rest` the text that
    remains at the end. Joined, these texts equal `decode_known` of the tokens. A character whose bytes span several tokens
    is returned with the last of these tokens.

    An incomplete character decodes to one � at the end, so only a � at the end can still change.
    """

    def __init__(self, tokenizer: Tokenizer, *, after: Sequence[int] = ()) -> None:
        """after: the tokens before the first token that is added"""
        self._tokenizer = tokenizer
        self._chunk = _context(tokenizer, after)
        self._shown = len(tokenizer.decode(self._chunk))

    def add(self, token: int) -> str:
        if token >= self._tokenizer.vocab_size:
            text = self.rest() + "�"  # an incomplete character before a token that the tokenizer lacks stays �
            self._chunk, self._shown = [], 0
            return text
        self._chunk.append(token)
        text, shown = self._tokenizer.decode(self._chunk), self._shown
        if text.endswith("�"):
            self._shown = max(shown, len(text) - 1)
            return text[shown:-1]
        self._chunk = self._chunk[-_CONTEXT:]
        self._shown = len(self._tokenizer.decode(self._chunk))
        return text[shown:]

    def rest(self) -> str:
        return self._tokenizer.decode(self._chunk)[self._shown :]


def text_after(tokenizer: Tokenizer, tokens: Sequence[int], after: Sequence[int]) -> str:
    """The text of `tokens`, which follow the tokens `after`: the joined output of a `TextStream`, decoded at once."""
    if any(token >= tokenizer.vocab_size for token in tokens):
        stream = TextStream(tokenizer, after=after)
        return "".join([*map(stream.add, tokens), stream.rest()])
    before = _context(tokenizer, after)
    return tokenizer.decode([*before, *tokens])[len(tokenizer.decode(before)) :]


def _context(tokenizer: Tokenizer, after: Sequence[int]) -> list[int]:
    return [token for token in after if token < tokenizer.vocab_size][-_CONTEXT:]


def _tokenizers() -> ModuleType:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            "tokenizer: got BPE, and tokenizers is not installed; accepted: 'bytes', or BPE after pip install 'tilegrad[bpe]'"
        ) from error
    return tokenizers


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Add the name of the file to an error of `tokenizers`, which raises a plain Exception or, if its Rust code panics,
    a BaseException."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{name}: not a tokenizer that Hugging Face tokenizers can use: {error}") from error
