"""Files of text → files of tokens, which a resumed run reads again.

    read_documents(paths) ─ tokenizer.encode ─ write_tokens, write_documents ┄ tokens.bin, documents.bin ┄ load_prepared
    read_records(paths) ─ messages ─ chat template ─ spans ┘

    tokens.bin               every token
    documents.bin            where documents end, and which tokens are trained on
    tokenizer.json           the tokenizer
    tokenizer_config.json    its EOS and its chat template, if it has them

Documents are encoded one by one if the tokenizer has an EOS, which is added to each document, or if rows are packed. Otherwise
all texts are joined and encoded as one text, and there is no documents.bin.

Tokens are written as documents are read, so memory grows only by 8 bytes for each document, and by a byte for each
token of a conversation. If a tokenizer.json does not split texts as GPT-2 does, one whole document at a time is in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Literal

import numpy as np

from ..text.atomic import sha256_of, write_whole
from ..text.untrusted import naming
from .chat_template import CONFIG, ChatTemplate, Conversation, Message, load_chat_template
from .conversations import Format, plain_conversation, read_messages, trained_tokens
from .document_file import Mask, open_documents, write_documents
from .documents import Documents, Numbers, Records, Show, check_surrogates, quiet, read_documents, read_records
from .tokenizer import ByteTokenizer, Encoded, Tokenizer, find_eos, load_tokenizer, train_bpe
from .tokens import TokenFile, TokenFileError, Tokens, open_tokens, write_tokens

TrainOn = Literal["assistant", "all"]
_LONG = 10_000_000  # texts with more characters get a progress message before each slow step
_TOGETHER, _CHARACTERS = 512, 1 << 20  # how many documents one call encodes, and about how many characters


@dataclass(frozen=True, slots=True)
class Source:
    """The tokenizer to use, and the settings in its folder. `tokenizer` is None if a BPE tokenizer must still be trained."""

    tokenizer: Tokenizer | None
    vocab_size: int
    eos: int | None
    template: ChatTemplate | None

    def config(self, tokenizer: Tokenizer) -> dict[str, object]:
        """The content of tokenizer_config.json for the prepared data."""
        tokens = dict(self.template.special_tokens) if self.template else {}
        eos = None if self.eos is None else tokenizer.decode([self.eos])
        template = {"chat_template": self.template.source} if self.template else {}
        return {**tokens, **({"eos_token": eos} if eos else {}), **template}


def prepare(
    paths: Sequence[Path],
    folder: Path,
    *,
    tokenizer: str = "bytes",
    vocab_size: int = 256,
    text_field: str = "text",
    format: Format = "text",
    train_on: TrainOn = "assistant",
    packing: bool = False,
    show: Show = quiet,
) -> tuple[TokenFile, Tokenizer]:
    """Write the tokens of these files into `folder`.

    tokenizer   "bytes" (vocab_size 256); "bpe", which learns vocab_size tokens from these texts; or a tokenizer.json
    text_field  the field of a .jsonl line that has the text
    format      "text", or the format of the conversations in .jsonl (conversations.py)
    train_on    the targets of a conversation: the text of the assistant, or all tokens
    packing     True: documents stay separate even if the tokenizer has no EOS
    show        is called with "prepare" before each slow step, and with "data" at the end: files, documents, bytes, tokens

    Files already in `folder` are reused if text and tokenizer are the same.
    """
    if not tokenizer.endswith(".json") and tokenizer not in ("bytes", "bpe"):
        raise ValueError(f"tokenizer: got {tokenizer!r}; accepted: 'bytes', 'bpe', or a tokenizer.json")
    if tokenizer == "bytes" and vocab_size != 256:
        raise ValueError(f"vocab_size: got {vocab_size}; accepted: 256 with the tokenizer 'bytes'")
    if format == "text":
        return _prepare_texts(
            read_documents(paths, text_field, show), folder, tokenizer, vocab_size, show, packing=packing
        )
    return _prepare_conversations(read_records(paths, show), folder, tokenizer, vocab_size, show, format, train_on)


def _source(tokenizer: str, vocab_size: int, *, documents: int) -> Source:
    if tokenizer == "bytes":
        return Source(ByteTokenizer(), 256, None, None)
    if tokenizer == "bpe":  # its last token is EOS if there are several documents and vocab_size has room for EOS
        return Source(None, vocab_size, vocab_size - 1 if documents > 1 and vocab_size > 256 else None, None)
    path = Path(tokenizer)
    loaded = load_tokenizer(path)
    return Source(loaded, loaded.vocab_size, find_eos(path.parent, loaded), load_chat_template(path.parent))


def _prepare_texts(
    texts: Documents, folder: Path, kind: str, vocab_size: int, show: Show, *, packing: bool
) -> tuple[TokenFile, Tokenizer]:
    source = _source(kind, vocab_size, documents=len(texts.lengths))
    separate = packing or source.eos is not None
    digest = texts.sha256
    if separate:
        digest = _sha256(json.dumps(["documents", source.eos, texts.lengths, digest]))
    prepared = _reusable(folder, digest, source, kind, separate=separate)
    if prepared is None:
        if source.tokenizer is None and texts.characters > _LONG:
            doing = f"learning {source.vocab_size:,} BPE tokens from {texts.characters:,} characters"
            show("prepare", {"doing": doing})
        tokenizer = _tokenizer(source, texts.text())
        if texts.characters > _LONG:
            show("prepare", {"doing": f"turning {texts.characters:,} characters into tokens"})
        encoded = (
            _encode_documents(texts, tokenizer, source.eos) if separate else [tokenizer.encode_pieces(texts.text())]
        )
        prepared = _write(folder, digest, tokenizer, source, ((parts, None) for parts in encoded), separate=separate)
    counts: Numbers = {"files": len(texts.files), "documents": len(texts.lengths), "left_out": texts.left_out}
    counts |= {"bytes": texts.bytes, "tokens": len(prepared[0].tokens)}
    from_file = kind not in ("bytes", "bpe")  # with a tokenizer.json the event has `eos` even if it is None
    eos = prepared[1].decode([source.eos]) if source.eos is not None else None
    show("data", counts | ({"eos": eos} if eos or from_file else {}))
    return prepared


def _encode_documents(texts: Documents, tokenizer: Tokenizer, eos: int | None) -> Iterator[Iterable[Tokens]]:
    """The tokens of each document in parts, with its EOS or its blank line. Short documents are encoded together."""
    waiting: list[str] = []

    def encode() -> Iterator[Iterable[Tokens]]:
        for tokens in tokenizer.encode_all(waiting):
            yield _with_eos([tokens], eos)
        waiting.clear()

    for document, length in zip(texts, texts.lengths, strict=True):
        pieces = document.pieces if eos is not None else chain(document.pieces, [document.blank_line])
        if len(waiting) == _TOGETHER or length + sum(map(len, waiting)) > _CHARACTERS:
            yield from encode()
        if length > _CHARACTERS:
            yield _with_eos(tokenizer.encode_pieces(pieces), eos)
        else:
            waiting.append("".join(pieces))
    yield from encode()


def _with_eos(parts: Iterable[Tokens], eos: int | None) -> Iterator[Tokens]:
    """The tokens of a document, and EOS unless they end with it."""
    last = None
    for tokens in parts:
        last = int(tokens[-1]) if len(tokens) else last
        yield tokens
    if eos is not None and last != eos:
        yield np.array([eos])


def _prepare_conversations(
    records: Records, folder: Path, kind: str, vocab_size: int, show: Show, format: Format, train_on: TrainOn
) -> tuple[TokenFile, Tokenizer]:
    source = _source(kind, vocab_size, documents=records.count)
    if kind == "bpe" and source.eos is None and vocab_size > 256:
        source = replace(source, eos=vocab_size - 1)
    template = source.template
    described = [format, train_on, source.eos, template and [template.source, template.special_tokens], records.sha256]
    digest = _sha256(json.dumps(described))
    prepared = _reusable(folder, digest, source, kind, separate=True)
    if prepared is None:
        show("prepare", {"doing": f"turning {records.count:,} conversations into tokens"})
        texts = ("\n\n" * (n > 0) + text for n, text in enumerate(_contents(records, format)))
        tokenizer = _tokenizer(source, texts)
        conversations = _conversations(records, tokenizer, source, format, train_on)
        prepared = _write(folder, digest, tokenizer, source, conversations)
    file, tokenizer = prepared
    counts: Numbers = {"files": len(records.files), "documents": records.count, "left_out": records.left_out}
    counts |= {"bytes": records.bytes, "tokens": len(file.tokens), "format": format}
    counts |= {"template": template.name if template else None}
    show("data", counts | {"eos": tokenizer.decode([source.eos]) if source.eos is not None else None})
    return prepared


def _messages(records: Records, format: Format) -> Iterator[tuple[str, list[Message]]]:
    for place, record in records:
        with naming(place):
            messages = read_messages(record, format)
            for message in messages:
                check_surrogates(str(message.get("content")), "the conversation")
        yield place, messages


def _contents(records: Records, format: Format) -> Iterator[str]:
    return (str(message.get("content")) for _, messages in _messages(records, format) for message in messages)


def _conversations(
    records: Records, tokenizer: Tokenizer, source: Source, format: Format, train_on: TrainOn
) -> Iterator[tuple[Iterable[Tokens], Mask]]:
    """The tokens of each conversation, and which of them are trained on."""
    template, end = source.template, "" if source.eos is not None else "\n\n"

    def rendered(messages: list[Message]) -> Conversation:
        if template is None:
            conversation = plain_conversation(messages, format, end)
        else:
            conversation = template.conversation(messages) if train_on == "assistant" else template.render(messages)
        return conversation if train_on == "assistant" else Conversation(conversation.text, ())

    all_messages = _messages(records, format)
    while batch := [*islice(all_messages, _TOGETHER)]:
        texts = []
        for place, messages in batch:
            with naming(place):
                texts.append(rendered(messages))
                check_surrogates(texts[-1].text, "the conversation")
        encoded = tokenizer.encode_with_offsets([text.text for text in texts], add_special_tokens=template is None)
        for text, found, (place, _) in zip(texts, encoded, batch, strict=True):
            with naming(place):
                tokens, trained = _tokens_and_targets(text, found, source)
            yield [tokens], trained


def _tokens_and_targets(text: Conversation, encoded: Encoded, source: Source) -> tuple[Tokens, Mask]:
    """(tokens, whether each is trained on). EOS is added unless the text ends with a special token, apart from white space.
    Without spans every token is trained on."""
    tokens, trained = encoded.tokens, trained_tokens(text, encoded)
    ends = np.flatnonzero(encoded.special)
    after = int(ends[-1]) + 1 if len(ends) else 0
    ended = len(ends) > 0 and (after == len(tokens) or not text.text[int(encoded.starts[after]) :].strip())
    if text.spans and text.spans[-1][1] == len(text.text) and len(tokens) and not encoded.ends[-1]:
        trained[-1] |= tokens[-1] == source.eos  # an EOS that the tokenizer itself has added, outside the text
    if source.eos is not None and not ended:
        tokens = np.append(tokens, tokens.dtype.type(source.eos))
        trained = np.append(trained, bool(text.spans) and text.spans[-1][1] == len(text.text))
    trained[:] |= not text.spans
    trained[:1] = False  # the first token is never a target
    if not trained.any():
        raise ValueError(
            "messages: got nothing to train on; accepted: a message of the assistant with at least one token"
        )
    return tokens, trained


def _tokenizer(source: Source, text: Iterable[str]) -> Tokenizer:
    return source.tokenizer or train_bpe(text, source.vocab_size, eos=source.eos is not None)


def _write(
    folder: Path,
    digest: str,
    tokenizer: Tokenizer,
    source: Source,
    documents: Iterable[tuple[Iterable[Tokens], Mask | None]],
    *,
    separate: bool = True,
) -> tuple[TokenFile, Tokenizer]:
    """Write all files. tokens.bin gets its name last: if it exists, the other files belong to it."""
    folder.mkdir(parents=True, exist_ok=True)
    described = {"source_sha256": digest, "tokenizer_sha256": _sha256(tokenizer.json())}
    ends, masks = [0], list[Mask]()

    def parts() -> Iterator[Tokens]:
        for document, trained in documents:
            end = ends[-1]
            for tokens in document:
                end += len(tokens)
                yield tokens
            if end > ends[-1]:
                ends.append(end)
            if trained is not None:
                masks.append(trained)
        write_the_other_files()

    def write_the_other_files() -> None:
        write_whole(folder / "tokenizer.json", [tokenizer.json().encode("utf-8")])
        if config := source.config(tokenizer):
            write_whole(folder / CONFIG, [json.dumps(config, indent=1, ensure_ascii=False).encode("utf-8")])
        else:
            (folder / CONFIG).unlink(missing_ok=True)
        if separate:
            trained = np.concatenate(masks) if masks else None
            write_documents(folder / "documents.bin", np.array(ends[1:], np.int64), trained, **described)
        else:
            (folder / "documents.bin").unlink(missing_ok=True)

    write_tokens(folder / "tokens.bin", parts(), vocab_size=tokenizer.vocab_size, **described)
    return _open(folder, documents=separate), tokenizer


def _open(folder: Path, *, documents: bool) -> TokenFile:
    """Open tokens.bin; with `documents`, documents.bin too."""
    file = open_tokens(folder / "tokens.bin")
    return replace(file, documents=open_documents(folder / "documents.bin", file)) if documents else file


def _reusable(
    folder: Path, digest: str, source: Source, kind: str, *, separate: bool
) -> tuple[TokenFile, Tokenizer] | None:
    """The tokens and tokenizer in `folder`; None if a file is missing or damaged, or if the text or the tokenizer differs."""
    try:
        file = _open(folder, documents=separate)
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    except (FileNotFoundError, TokenFileError, UnicodeDecodeError):
        return None
    if (file.source_sha256, file.vocab_size, file.tokenizer_sha256) != (digest, source.vocab_size, _sha256(text)):
        return None
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    if isinstance(tokenizer, ByteTokenizer) != (kind == "bytes"):
        return None
    return (file, tokenizer) if source.tokenizer is None or tokenizer.json() == source.tokenizer.json() else None


def load_prepared(folder: Path, *, documents: bool = False) -> tuple[TokenFile, Tokenizer]:
    """The tokens and tokenizer that `prepare` wrote into `folder`. Raises if another tokenizer made the tokens. With
    `documents`, documents.bin must exist too."""
    for name in ("tokens.bin", "tokenizer.json", *(["documents.bin"] if documents else [])):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}: no such file; put the run's own file back, or start a new run")
    file = _open(folder, documents=documents)
    sha256 = sha256_of(folder / "tokenizer.json")
    if sha256 != file.tokenizer_sha256:
        raise ValueError(
            f"{folder / 'tokenizer.json'}: got a tokenizer of sha256 {sha256[:12]}…; accepted: the tokenizer of tokens.bin, "
            f"{file.tokenizer_sha256[:12]}…"
        )
    return file, load_tokenizer(folder / "tokenizer.json")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
