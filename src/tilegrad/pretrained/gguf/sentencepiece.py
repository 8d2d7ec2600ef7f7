"""SentencePiece's BPE, GGUF's tokenizer model "llama": scores of tokens ↔ merges of tokenizer.json.

SentencePiece joins the two neighbours whose joined token has the best score. BPE joins the two neighbours whose pair comes
first in the list of merges. Both give the same tokens if the list has every split of every token, sorted by score:

    merges = [(left, right) for token by score, best first, for left + right = token]        score = −rank of the token
"""

from __future__ import annotations

from collections.abc import Mapping

from ...data.tokenizer import BYTE_TOKEN
from ...text.untrusted import shown
from .container import Value

Json = dict[str, object]
NORMAL, UNKNOWN, BYTE = 1, 2, 6
_MOST_CHARACTERS = 1000  # the longest token whose splits are looked up
_SPACE: Json = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_PREFIX: Json = {"type": "Prepend", "prepend": "▁"}
_SPACES: Json = {"type": "Sequence", "normalizers": [_PREFIX, _SPACE]}


def _splits(token: str, vocab: Mapping[str, int]) -> list[list[str]]:
    """The pairs of tokens in `vocab` that, joined, give `token`."""
    if len(token) > _MOST_CHARACTERS:
        raise ValueError(f"got the token {shown(token)}; accepted: at most {_MOST_CHARACTERS} characters")
    pairs = [[token[:at], token[at:]] for at in range(1, len(token))]
    found = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
    return sorted(found, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))


def parts_of(values: Mapping[str, Value], tokens: list[str], types: list[int]) -> Json:
    """model, normalizer and decoder of tokenizer.json from the metadata."""
    scores = values.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) < len(tokens) or not all(isinstance(s, float) for s in scores):
        raise ValueError(f"tokenizer.ggml.scores: got {shown(scores)}; accepted: a number for each token")
    vocab = {token: i for i, token in enumerate(tokens)}
    normal = [i for i in range(len(tokens)) if types[i] == NORMAL]
    normal.sort(key=lambda i: -float(str(scores[i])))
    unknown = values.get("tokenizer.ggml.unknown_token_id", 0)
    model: Json = {
        "unk_token": tokens[unknown] if type(unknown) is int and 0 <= unknown < len(tokens) else None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": [pair for i in normal for pair in _splits(tokens[i], vocab)],
    }
    prefix = values.get("tokenizer.ggml.add_space_prefix", True) is not False
    back: list[Json] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    back += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "model": model,
        "normalizer": _SPACES if prefix else _SPACE,
        "decoder": {"type": "Sequence", "decoders": back},
    }


def is_sentencepiece(content: Json) -> bool:
    model = content["model"]
    return isinstance(model, dict) and model.get("type") == "BPE" and bool(model.get("byte_fallback"))


def values_of(content: Json, tokens: list[str], types: list[int]) -> tuple[dict[str, Value], list[str]]:
    """(scores and add_space_prefix, notes for the user). Also writes the types of byte tokens and of the unknown token into
    `types`."""
    prefix, notes = _prefix(content)
    model = content["model"]
    assert isinstance(model, dict)
    pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]
    places: dict[str, int] = {}
    for left, right in pairs:
        places.setdefault(left + right, len(places))
    for i, token in enumerate(tokens):
        types[i] = BYTE if types[i] == NORMAL and BYTE_TOKEN.fullmatch(token) else types[i]
    vocab = {token: i for i, token in enumerate(tokens)}
    made = [pair for token, kind in zip(tokens, types, strict=True) if kind == NORMAL for pair in _splits(token, vocab)]
    order = [left + right for left, right in pairs]
    grouped = sorted(order, key=places.__getitem__) == order
    if not grouped or sorted(map(tuple, made)) != sorted(map(tuple, pairs)):
        raise ValueError(
            "merges: got some that no scores of SentencePiece give; accepted: every split of each token, by score"
        )
    scores = [-float(places.get(token, len(places) + i)) for i, token in enumerate(tokens)]
    numbers = [score if types[i] == NORMAL else 0.0 for i, score in enumerate(scores)]
    out: dict[str, Value] = {"tokenizer.ggml.scores": [*numbers], "tokenizer.ggml.add_space_prefix": prefix}
    if (unknown := vocab.get(str(model.get("unk_token")))) is not None:
        types[unknown] = UNKNOWN
        out["tokenizer.ggml.unknown_token_id"] = unknown
    return out, notes


def _prefix(content: Json) -> tuple[bool, list[str]]:
    """(whether a space is put before a text, notes for the user)"""
    normalizer, pre = content.get("normalizer"), content.get("pre_tokenizer")
    if pre is None and normalizer in (_SPACES, _SPACE):
        return normalizer == _SPACES, []
    scheme = pre.get("prepend_scheme") if isinstance(pre, dict) and pre.get("type") == "Metaspace" else None
    if normalizer is None and scheme in ("first", "always", "never") and isinstance(pre, dict) and not pre.get("split"):
        note = "llama.cpp also puts a space before the text after each special token, which tokenizer.json does not"
        return scheme != "never", [note] if scheme == "first" else []
    raise ValueError(f"normalizer: got {shown(normalizer)}; accepted: one that writes spaces as ▁, as llama.cpp does")
