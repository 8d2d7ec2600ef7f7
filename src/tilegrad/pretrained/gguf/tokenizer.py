"""Tokenizers: tokenizer.json and tokenizer_config.json ↔ GGUF's metadata.

Byte-level BPE is the tokenizer model "gpt2" of GGUF; tokenizer.ggml.pre names a pre-tokenizer in the code of llama.cpp. A table
maps these names to the pre_tokenizer, normalizer and ignore_merges of tokenizer.json. The BPE of SentencePiece is the tokenizer
model "llama" (sentencepiece.py).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...data.chat_template import load_chat_template, token_text
from ...data.tokenizer import BpeTokenizer, find_eos, load_tokenizer
from ...text.untrusted import file_in, naming, read_json, shown
from .container import Value
from .sentencepiece import Json, is_sentencepiece, parts_of, values_of

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED = 1, 2, 3, 4, 5
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # tokenizer_config.json → GGUF
_NO_EOS = "ÿ"  # EOS if a tokenizer has none: byte 0xff, never in UTF-8; llama.cpp's default would be token 11
_NO_MERGE = "␀ ␀"  # written if a tokenizer has no merges: llama.cpp needs a merge, and this one joins no bytes
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(*, regex: bool) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": regex}


def _split(pattern: str) -> Json:
    rule = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [rule, _byte_level(regex=False)]}


@dataclass(frozen=True, slots=True)
class Pre:
    """A pre-tokenizer in the code of llama.cpp."""

    pre_tokenizer: Json
    normalizer: Json | None = None
    ignore_merges: bool = False
    add_bos: bool = False  # used if a file lacks the key add_bos_token
    aliases: tuple[str, ...] = ()


_DIGITS: Json = {
    "type": "Sequence",
    "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level(regex=True)],
}
_CASES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PRE = {
    "gpt-2": Pre(_byte_level(regex=True), aliases=("phi-2", "olmo", "mpt")),
    "smollm": Pre(_DIGITS, aliases=("starcoder", "refact", "codeshell")),
    "llama-bpe": Pre(
        _split(rf"{_CASES}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"),
        ignore_merges=True,
        add_bos=True,
        aliases=("llama3", "llama-v3"),
    ),
    "qwen2": Pre(_split(rf"{_CASES}|{_LETTERS}|\p{{N}}|{_REST}"), {"type": "NFC"}, aliases=("deepseek-r1-qwen",)),
    "tekken": Pre(_split(_TEKKEN), ignore_merges=True, add_bos=True),
}


def _canonical(value: object) -> object:
    """`value` without trim_offsets, which changes no token. A Sequence of one element is replaced by this element."""
    if isinstance(value, list):
        return [_canonical(one) for one in value]
    if not isinstance(value, dict):
        return value
    for name in ("pretokenizers", "normalizers"):
        if value.get("type") == "Sequence" and isinstance(several := value.get(name), list) and len(several) == 1:
            return _canonical(several[0])
    return {key: _canonical(one) for key, one in value.items() if key != "trim_offsets"}


def byte_characters() -> list[str]:
    """The character of each byte in byte-level BPE: a printable byte maps to itself, other bytes to U+0100 and above."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]


# ---- tokenizer.json → metadata


def tokenizer_values(
    tokenizer: Path | None, origin: Path | None, vocab_size: int
) -> tuple[dict[str, Value], list[str]]:
    """(keys tokenizer.*, notes for the user). llama.cpp can load a file without a tokenizer, but can't turn text into
    tokens."""
    if tokenizer is None:
        note = "there is no tokenizer.json: llama.cpp loads the model, but can't turn text into tokens"
        return {"tokenizer.ggml.model": "none"}, [note]
    found = load_tokenizer(tokenizer)
    content = json.loads(found.json())
    if isinstance(found, BpeTokenizer):
        if (kind := content["model"]["type"]) != "BPE":
            raise ValueError(f"{tokenizer}: model: got {shown(kind)}; accepted: 'BPE'")
        first, last = _bos_and_eos(found, tokenizer)
    else:
        first, last = [], []
        vocab = {character: byte for byte, character in enumerate(byte_characters())}
        content = {**_new_json({"vocab": vocab, "merges": []}), "pre_tokenizer": PRE["gpt-2"].pre_tokenizer}
    tokens, types = _tokens(content, vocab_size, tokenizer)
    with naming(tokenizer):
        if is_sentencepiece(content):
            out, notes = values_of(content, tokens, types)
            out |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
        else:
            merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]]
            out, notes = {"tokenizer.ggml.merges": [*(merges or [_NO_MERGE])]}, []
            out |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": _pre_name(content)}
    out |= {"tokenizer.ggml.tokens": [*tokens], "tokenizer.ggml.token_type": [*types]}
    folder = tokenizer.parent if origin is None else origin
    special = _named_ids(_settings(folder), tokens)
    eos = find_eos(folder, found)
    if eos is not None or _NO_EOS in tokens:
        special["eos"] = tokens.index(_NO_EOS) if eos is None else eos
    special |= {role: ids[0] for role, ids in (("bos", first), ("eos", last)) if ids}
    out |= {f"tokenizer.ggml.{_SPECIAL[name]}_token_id": i for name, i in special.items()}
    out |= {"tokenizer.ggml.add_bos_token": bool(first), "tokenizer.ggml.add_eos_token": bool(last)}
    if (template := load_chat_template(folder)) is not None:
        out["tokenizer.chat_template"] = template.source
    if stripped := [t["content"] for t in content["added_tokens"] if t["lstrip"] or t["rstrip"] or t["single_word"]]:
        notes.append(f"llama.cpp keeps the spaces around {shown(stripped[0])}, which tokenizer.json removes")
    return out, notes


def _pre_name(content: Json) -> str:
    """The name of the pre-tokenizer in llama.cpp."""
    model = content["model"]
    assert isinstance(model, dict)
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(key):
            raise ValueError(f"model.{key}: got {shown(model[key])}; accepted: none")
    form = tuple(_canonical(content.get(key)) for key in ("pre_tokenizer", "normalizer"))
    for name, pre in PRE.items():
        same = form == (_canonical(pre.pre_tokenizer), _canonical(pre.normalizer))
        if same and bool(model.get("ignore_merges")) == pre.ignore_merges:
            return name
    got = "; ".join(f"{key}: got {shown(json.dumps(content.get(key)))}" for key in ("pre_tokenizer", "normalizer"))
    merges = bool(model.get("ignore_merges"))
    raise ValueError(f"{got}; ignore_merges: got {merges}; accepted: the settings of {', '.join(PRE)} in llama.cpp")


def _bos_and_eos(tokenizer: BpeTokenizer, path: Path) -> tuple[list[int], list[int]]:
    """The tokens that the post-processor puts before and after a text."""
    tokens, text = tokenizer.encode("!").tolist(), tokenizer.inner.encode("!", add_special_tokens=False).ids
    at = next((i for i in range(len(tokens)) if tokens[i : i + len(text)] == text), 2)
    first, last = tokens[:at], tokens[at + len(text) :]
    if len(first) > 1 or len(last) > 1:
        raise ValueError(f"{path}: post_processor: got tokens {shown(tokens)} for '!'; accepted: BOS, text, EOS")
    return first, last


def _tokens(content: Json, vocab_size: int, path: Path) -> tuple[list[str], list[int]]:
    """(tokens, types) by id, as many as the vocabulary of the model has."""
    model, added = content["model"], content["added_tokens"]
    assert isinstance(model, dict) and isinstance(added, list)
    text = {i: token for token, i in model["vocab"].items()}
    types = dict.fromkeys(text, _NORMAL)
    for token in added:
        text[token["id"]] = token["content"]
        types[token["id"]] = _CONTROL if token["special"] or _looks_special(token["content"]) else _USER
    if max(text) >= vocab_size:
        raise ValueError(
            f"{path}: got {max(text) + 1:,} tokens; accepted: at most {vocab_size:,}, the model's vocabulary"
        )
    tokens = [text.get(i, f"[PAD{i}]") for i in range(vocab_size)]
    if len({*tokens}) != vocab_size:
        twice = Counter(tokens).most_common(1)[0][0]
        raise ValueError(f"{path}: got the token {shown(twice)} twice; accepted: each once, as llama.cpp needs it")
    return tokens, [types.get(i, _UNUSED) for i in range(vocab_size)]


def _looks_special(token: str) -> bool:
    """Whether llama.cpp's converter makes the token a control token, whatever tokenizer.json says: <|…|>, <pad> or <mask>."""
    return token.startswith("<|") and token.endswith("|>") or token in ("<pad>", "<mask>")


def _settings(folder: Path) -> Json:
    """The keys of tokenizer_config.json, generation_config.json and config.json. If several have a key, the first counts."""
    out: Json = {}
    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        if (folder / name).exists() and isinstance(content := read_json(file_in(folder, name)), dict):
            out = {**content, **{key: value for key, value in out.items() if value is not None}}
    return out


def _named_ids(settings: Json, tokens: list[str]) -> dict[str, int]:
    """role → id of its token, by a name in `settings`, else by an id. `find_eos` finds EOS, which is left out here."""
    out: dict[str, int] = {}
    for role in ("bos", "unk", "pad"):
        named, i = token_text(settings, f"{role}_token"), settings.get(f"{role}_token_id")
        i = i[0] if isinstance(i, list) and i else i
        if named in tokens:
            out[role] = tokens.index(named)
        elif type(i) is int and 0 <= i < len(tokens):
            out[role] = i
    return out


# ---- metadata → tokenizer.json


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """`files` maps the name of each file to its content; `notes` are for the user."""

    files: Mapping[str, Json] = field(default_factory=dict)
    ids: Mapping[str, int] = field(default_factory=dict)  # bos_token_id … of config.json
    notes: tuple[str, ...] = ()


def tokenizer_files(values: Mapping[str, Value]) -> TokenizerFiles:
    """tokenizer.json and tokenizer_config.json from the metadata. For an unsupported kind of tokenizer there is a note and no
    tokenizer.json."""
    tokens, types = values.get("tokenizer.ggml.tokens"), values.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list):
        return TokenizerFiles(notes=("it has no tokenizer: give one by --tokenizer tokenizer.json",))
    if not all(isinstance(token, str) for token in tokens):
        raise ValueError(f"tokenizer.ggml.tokens: got {shown(tokens)}; accepted: strings")
    texts = [str(token) for token in tokens]
    given = types if types is not None else [*[_NORMAL] * len(tokens)]
    if not isinstance(given, list) or len(given) != len(tokens) or not all(type(one) is int for one in given):
        raise ValueError(f"tokenizer.ggml.token_type: got {shown(given)}; accepted: a number for each token")
    kinds = [int(one) for one in given]
    used = len(tokens)
    while used and kinds[used - 1] == _UNUSED and tokens[used - 1] == f"[PAD{used - 1}]":
        used -= 1
    if len({*texts[:used]}) != used:
        raise ValueError("tokenizer.ggml.tokens: got a token twice; accepted: each once")
    roles = _roles(values, texts)
    settings: Json = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= {f"{role}_token": texts[i] for role, i in roles.items()}
    if isinstance(template := values.get("tokenizer.chat_template"), str):
        settings["chat_template"] = template
    ids = {f"{role}_token_id": i for role, i in roles.items() if role != "unk"}
    model, name = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre", "default")
    pre = next((pre for known, pre in PRE.items() if name in (known, *pre.aliases)), None)
    if model == "gpt2" and pre is not None:
        content = _byte_level_json(values, texts[:used], pre)
    elif model == "llama":
        parts = parts_of(values, texts[:used], kinds)
        content = {**_new_json(parts.pop("model")), **parts}
    else:
        kind = f"{shown(model)} with pre-tokenizer {shown(name)}" if model == "gpt2" else shown(model)
        note = f"its tokenizer ({kind}) can't be converted to tokenizer.json: give one by --tokenizer tokenizer.json"
        return TokenizerFiles({"tokenizer_config.json": settings}, ids, (note,))
    content["added_tokens"] = [
        _added_token(i, texts[i], kinds[i]) for i in range(used) if kinds[i] in (_UNKNOWN, _CONTROL, _USER)
    ]
    adds = {role: values.get(f"tokenizer.ggml.add_{role}_token") for role in ("bos", "eos")}
    if adds["bos"] is None:
        adds["bos"] = model == "llama" or pre is not None and pre.add_bos
    around: dict[str, str] = {
        role: texts[roles[role]] for role in ("bos", "eos") if adds[role] is True and role in roles
    }
    content["post_processor"] = _post_processor(around, roles) if around else content["post_processor"]
    settings |= {"add_bos_token": "bos" in around, "add_eos_token": "eos" in around}
    return TokenizerFiles({"tokenizer.json": content, "tokenizer_config.json": settings}, ids)


def _roles(values: Mapping[str, Value], tokens: list[str]) -> dict[str, int]:
    out: dict[str, int] = {}
    for role, theirs in _SPECIAL.items():
        i = values.get(f"tokenizer.ggml.{theirs}_token_id")
        if type(i) is int and 0 <= i < len(tokens) and not (role == "eos" and tokens[i] == _NO_EOS):
            out[role] = i
    return out


def _added_token(i: int, token: str, kind: int) -> Json:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": token, **flags, "special": kind != _USER}


def _post_processor(around: Mapping[str, str], roles: Mapping[str, int]) -> Json:
    """A post-processor that puts BOS before each text and EOS after it."""

    def piece(text: str, place: int) -> Json:
        return {"SpecialToken": {"id": text, "type_id": place}}

    def one(name: str, place: int) -> list[Json]:
        before, after = ([piece(around[role], place)] if role in around else [] for role in ("bos", "eos"))
        return [*before, {"Sequence": {"id": name, "type_id": place}}, *after]

    special = {text: {"id": text, "ids": [roles[role]], "tokens": [text]} for role, text in around.items()}
    pair = [*one("A", 0), *one("B", 1)]
    return {"type": "TemplateProcessing", "single": one("A", 0), "pair": pair, "special_tokens": special}


def _new_json(model: object) -> Json:
    """A tokenizer.json with a BPE model and without other parts."""
    assert isinstance(model, dict)
    parts = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    more = {"added_tokens": list[Json](), "model": {"type": "BPE", "dropout": None, **model}}
    return {"version": "1.0", **dict.fromkeys(parts), **more}


def _byte_level_json(values: Mapping[str, Value], tokens: list[str], pre: Pre) -> Json:
    merges = values.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not all(isinstance(pair, str) for pair in merges):
        raise ValueError(f"tokenizer.ggml.merges: got {shown(merges)}; accepted: strings")
    model: Json = {
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": pre.ignore_merges,
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": [str(pair).split(" ", 1) for pair in merges if pair != _NO_MERGE],
    }
    post: Json = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    own: Json = {"normalizer": pre.normalizer, "pre_tokenizer": pre.pre_tokenizer, "post_processor": post}
    return {**_new_json(model), **own, "decoder": _byte_level(regex=True)}
