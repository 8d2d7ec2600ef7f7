"""The text of the five-minute benchmark: `python -m benchmarks.five_minutes.data FOLDER`.

wheels.txt lists Python packages with their versions and SHA-256. pip fetches their wheels, which are not installed, run or
unpacked to disk. The text is the source and documentation in them:

    wheels.txt ─ pip download ─ FOLDER/wheels ─ documents ─ BPE ─ FOLDER/train.bin, validation.bin

A file that several wheels have is read once. Its SHA-256 decides whether it is held out. The BPE is learned on a sample of the
training text. manifest.json, next to this module, has the sizes and SHA-256 of the text that this recipe gives.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tilegrad.data.tokenizer import BpeTokenizer, train_bpe
from tilegrad.data.tokens import Tokens, open_tokens, tokens_sha256, write_tokens
from tilegrad.text.atomic import sha256_of, write_whole
from tilegrad.text.table import table

HERE = Path(__file__).parent
WHEELS, RECORDED = HERE / "wheels.txt", HERE / "manifest.json"
MANIFEST, TOKEN_BYTES = "manifest.json", "token_bytes.npy"
LINE = re.compile(r"(?P<name>[\w.-]+)==(?P<version>[\w.!+]+) --hash=sha256:(?P<sha256>[0-9a-f]{64})")
SUFFIXES = frozenset({".md", ".py", ".pyi", ".rst", ".txt", ".yaml", ".yml"})
LEAST_BYTES, MOST_BYTES = 256, 1 << 18  # a shorter file says little, a longer one is generated or a table
HELD_OUT = 100  # one in HELD_OUT files is validation text
VOCAB_SIZE = 32768
SAMPLED = 10  # the BPE is learned on one in SAMPLED training files
TOGETHER = 512  # files that one call encodes
SPLITS = ("train", "validation")


@dataclass(frozen=True, slots=True)
class Wheel:
    name: str
    version: str
    sha256: str

    @property
    def stem(self) -> str:
        """The beginning of its file's name."""
        return f"{re.sub('[-_.]+', '_', self.name).lower()}-{self.version}-"


@dataclass(frozen=True, slots=True)
class Split:
    """The sizes of a split. sha256: the digest of its tokens."""

    files: int
    bytes: int
    tokens: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The sizes and digests of the text that was made. wheels_sha256: the digest of wheels.txt."""

    wheels: int
    wheels_sha256: str
    vocab_size: int
    tokenizer_sha256: str
    train: Split
    validation: Split


@dataclass(frozen=True, slots=True)
class Data:
    """The tokens of both splits. token_bytes: the bytes of text of each token, 0 for EOS."""

    train: Tokens
    validation: Tokens
    token_bytes: Tokens
    manifest: Manifest


# ── wheels ──


def listed(path: Path) -> list[Wheel]:
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        match = LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"{path}, line {number}: got {line!r}; accepted: NAME==VERSION --hash=sha256:DIGEST")
        found.append(Wheel(**match.groupdict()))
    if not found:
        raise ValueError(f"{path}: got no package; accepted: a line for each package")
    return found


def fetch(path: Path, folder: Path) -> None:
    """Let pip download the wheels of the list `path`, from its own index. It checks each digest."""
    arguments = ("--no-deps", "--only-binary", ":all:", "--ignore-requires-python", "--require-hashes")
    subprocess.run(
        [sys.executable, "-m", "pip", "download", *arguments, "--dest", str(folder), "-r", str(path)], check=True
    )


def checked(wheels: Sequence[Wheel], folder: Path) -> list[Path]:
    """The files of the wheels, in the order of the list. A missing one, or one with another digest, is refused by name."""
    there = {path.name.lower(): path for path in folder.glob("*.whl")}
    found = []
    for wheel in wheels:
        path = next((there[name] for name in sorted(there) if _stem(name) == wheel.stem), None)
        if path is None:
            raise ValueError(f"{folder}: got no wheel of {wheel.name} {wheel.version}; accepted: all that are listed")
        digest = sha256_of(path)
        if digest != wheel.sha256:
            remedy = "delete the file and run again"
            raise ValueError(f"{path}: got SHA-256 {digest}; accepted: {wheel.sha256}, as listed; {remedy}")
        found.append(path)
    return found


def _stem(name: str) -> str:
    package, version, _ = (*name.split("-", 2), "", "")[:3]
    return f"{re.sub('[-_.]+', '_', package)}-{version}-"


# ── documents ──


def documents(wheels: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """(SHA-256, text) of each text file once: wheel by wheel, in the order of file names."""
    seen: set[str] = set()
    for path in wheels:
        with zipfile.ZipFile(path) as archive:
            for member in sorted(archive.infolist(), key=lambda member: member.filename):
                name = Path(member.filename)
                if not (name.suffix.lower() in SUFFIXES or name.name == "METADATA"):
                    continue
                if not LEAST_BYTES <= member.file_size <= MOST_BYTES:
                    continue
                content = archive.read(member)
                digest = hashlib.sha256(content).hexdigest()
                text = _text(content)
                if text is not None and digest not in seen:
                    seen.add(digest)
                    yield digest, text


def _text(content: bytes) -> str | None:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def is_held_out(digest: str) -> bool:
    return int(digest[:8], 16) % HELD_OUT == 0


# ── the folder ──


def make(folder: Path, wheels: Sequence[Path], list_sha256: str, *, vocab_size: int, sampled: int) -> Manifest:
    """Write tokens, tokenizer and manifest of these wheels into `folder`."""
    training = ((digest, text) for digest, text in documents(wheels) if not is_held_out(digest))
    sample = "".join(text for digest, text in training if int(digest[8:16], 16) % sampled == 0)
    tokenizer = train_bpe(sample, vocab_size, eos=True)
    del sample
    at = folder / "tokenizer.json"
    write_whole(at, [tokenizer.json().encode()])
    tokenizer_sha256, splits = sha256_of(at), {split: _Encoder(tokenizer) for split in SPLITS}
    for digest, text in documents(wheels):
        splits["validation" if is_held_out(digest) else "train"].add(digest, text)
    train, validation = (splits[split].write(folder / f"{split}.bin", tokenizer_sha256) for split in SPLITS)
    np.save(folder / TOKEN_BYTES, _token_bytes(tokenizer))
    manifest = Manifest(len(wheels), list_sha256, vocab_size, tokenizer_sha256, train, validation)
    write_whole(folder / MANIFEST, [json.dumps(asdict(manifest), indent=1).encode() + b"\n"])
    return manifest


class _Encoder:
    """The tokens of one split: those of each file, then EOS."""

    def __init__(self, tokenizer: BpeTokenizer) -> None:
        self._tokenizer, self._eos = tokenizer, tokenizer.vocab_size - 1  # `train_bpe` puts EOS last
        self._waiting: list[str] = []
        self._encoded: list[Tokens] = []
        self._digest, self._files, self._bytes = hashlib.sha256(), 0, 0

    def add(self, digest: str, text: str) -> None:
        self._digest.update(bytes.fromhex(digest))
        self._files, self._bytes = self._files + 1, self._bytes + len(text.encode())
        self._waiting.append(text)
        if len(self._waiting) == TOGETHER:
            self._encode()

    def _encode(self) -> None:
        for tokens in self._tokenizer.encode_all(self._waiting):
            self._encoded.append(np.append(tokens, tokens.dtype.type(self._eos)))
        self._waiting.clear()

    def write(self, path: Path, tokenizer_sha256: str) -> Split:
        self._encode()
        if not self._encoded:
            raise ValueError(f"{path}: got no text; accepted: wheels with more files")
        tokens = np.concatenate(self._encoded)
        size, source = self._tokenizer.vocab_size, self._digest.hexdigest()
        write_tokens(path, [tokens], vocab_size=size, source_sha256=source, tokenizer_sha256=tokenizer_sha256)
        return Split(self._files, self._bytes, len(tokens), tokens_sha256(tokens))


def _token_bytes(tokenizer: BpeTokenizer) -> Tokens:
    found = tokenizer.byte_lengths()
    assert found is not None  # the BPE is byte-level
    return found.astype(np.uint16)


def check_folder(folder: Path) -> None:
    """Refuse a folder with files that `main` did not make, because it would replace some of them."""
    if folder.exists() and not (folder / MANIFEST).is_file():
        other = sorted(path.name for path in folder.iterdir() if path.name != "wheels")
        if other:
            accepted = "an empty or new folder, or one that a run of this command finished"
            raise ValueError(f"folder: got {folder}, which has {other[0]}; accepted: {accepted}")


def read_manifest(path: Path) -> Manifest:
    if not path.is_file():
        make_it = "python -m benchmarks.five_minutes.data FOLDER"
        raise ValueError(f"data: got {path.parent}, which has no {path.name}; accepted: a folder that `{make_it}` made")
    content = json.loads(path.read_text(encoding="utf-8"))
    train, validation = (Split(**content.pop(split)) for split in SPLITS)
    return Manifest(**content, train=train, validation=validation)


def open_data(folder: Path) -> Data:
    """Read the folder. Tokens whose digest is not the manifest's are refused by name."""
    manifest = read_manifest(folder / MANIFEST)
    tokens = {}
    for split in SPLITS:
        path, expected = folder / f"{split}.bin", getattr(manifest, split).sha256
        file = open_tokens(path)
        digest = tokens_sha256(file.tokens)
        if digest != expected:
            raise ValueError(f"{path}: got tokens of SHA-256 {digest}; accepted: {expected}, as the manifest has")
        tokens[split] = file.tokens
    token_bytes = np.load(folder / TOKEN_BYTES, allow_pickle=False)
    size = int(token_bytes[tokens["validation"]].sum(dtype=np.int64))
    if size != manifest.validation.bytes:
        accepted = f"{manifest.validation.bytes}, as the manifest has"
        raise ValueError(f"{folder / TOKEN_BYTES}: got {size} bytes of validation text; accepted: {accepted}")
    return Data(tokens["train"], tokens["validation"], token_bytes, manifest)


def differences(found: Manifest, recorded: Manifest) -> list[str]:
    ours, theirs = _flat(asdict(found)), _flat(asdict(recorded))
    return [f"{name}: got {ours[name]}, recorded {theirs[name]}" for name in ours if ours[name] != theirs[name]]


def _flat(values: Mapping[str, object], before: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in values.items():
        found |= _flat(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return found


def report(manifest: Manifest) -> str:
    rows = [
        (split, f"{part.files:,}", f"{part.bytes:,}", f"{part.tokens:,}", part.sha256)
        for split in SPLITS
        for part in [getattr(manifest, split)]
    ]
    return table(("text", "files", "bytes", "tokens", "SHA-256 of tokens"), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.five_minutes.data", description="Make the text.")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--no-fetch", action="store_true", help="do not run pip: FOLDER/wheels has the wheels already")
    args = parser.parse_args(arguments)
    check_folder(args.folder)
    wheels = args.folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    if not args.no_fetch:
        fetch(WHEELS, wheels)
    found = checked(listed(WHEELS), wheels)
    manifest = make(args.folder, found, sha256_of(WHEELS), vocab_size=VOCAB_SIZE, sampled=SAMPLED)
    print(report(manifest))
    different = differences(manifest, read_manifest(RECORDED))
    print("\n".join(different) if different else f"as recorded in {RECORDED.name}")
    return int(bool(different))


if __name__ == "__main__":
    raise SystemExit(main())
