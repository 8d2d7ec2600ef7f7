"""Documents → tokens on disk, which a resumed run reads again.

read_documents(paths) ─ tokenizer.encode ─ write_tokens ┄ tokens.bin ┄ open_tokens
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from ..text.atomic import sha256_of, write_whole
from .documents import Show, quiet, read_documents
from .tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, train_bpe
from .tokens import TokenFile, TokenFileError, open_tokens, write_tokens

_LONG = 10_000_000  # texts with more characters get a progress message before each slow step


def prepare(
    paths: Sequence[Path],
    folder: Path,
    *,
    tokenizer: str = "bytes",
    vocab_size: int = 256,
    text_field: str = "text",
    show: Show = quiet,
) -> tuple[TokenFile, Tokenizer]:
    """Write the tokens of these texts into `folder`: tokens.bin and tokenizer.json.

    tokenizer   "bytes" (vocab_size 256); "bpe", which learns vocab_size tokens from these texts; or a tokenizer.json
    text_field  the field of a .jsonl line that holds the text
    show        is called with "prepare" before each slow step, and with "data" at the end: files, documents, bytes, tokens
    Files already in `folder` are reused if text and tokenizer are the same. All of the text is in memory while it is encoded.
    """
    given = load_tokenizer(Path(tokenizer)) if tokenizer.endswith(".json") else None
    if given is None and tokenizer not in ("bytes", "bpe"):
        raise ValueError(f"tokenizer: got {tokenizer!r}; accepted: 'bytes', 'bpe', or a tokenizer.json")
    if tokenizer == "bytes" and vocab_size != 256:
        raise ValueError(f"vocab_size: got {vocab_size}; accepted: 256 with the tokenizer 'bytes'")
    read = read_documents(paths, text_field, show)
    text, source = read.text, _sha256(read.text)
    found = _prepared(folder, source, tokenizer, given.vocab_size if given else vocab_size)
    if found and given and found[1].json() != given.json():
        found = None
    if found is None:
        long = len(text) > _LONG
        if long and tokenizer == "bpe":
            show("prepare", {"doing": f"learning {vocab_size:,} BPE tokens from {len(text):,} characters"})
        made: Tokenizer = given or (ByteTokenizer() if tokenizer == "bytes" else train_bpe(text, vocab_size))
        if long:
            show("prepare", {"doing": f"turning {len(text):,} characters into tokens"})
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
    counts = {"files": read.files, "documents": read.documents, "left_out": read.left_out}
    show("data", counts | {"bytes": len(text.encode("utf-8")), "tokens": len(found[0].tokens)})
    return found


def _prepared(folder: Path, source: str, kind: str, vocab_size: int) -> tuple[TokenFile, Tokenizer] | None:
    """The tokens and tokenizer in `folder`; None if a file is missing or damaged, or if the text or the tokenizer differs."""
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
    """The tokens and tokenizer that `prepare` wrote into `folder`; refused if the tokens were made by another tokenizer."""
    for name in ("tokens.bin", "tokenizer.json"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}: no such file; put the run's own back, or start a new run")
    file = open_tokens(folder / "tokens.bin")
    found = sha256_of(folder / "tokenizer.json")
    if found != file.tokenizer_sha256:
        raise ValueError(
            f"{folder / 'tokenizer.json'}: got a tokenizer of sha256 {found[:12]}…; accepted: the one that made tokens.bin, "
            f"{file.tokenizer_sha256[:12]}…"
        )
    return file, load_tokenizer(folder / "tokenizer.json")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
