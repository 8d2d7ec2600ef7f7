"""The cache of Hugging Face, where `hf download ORG/NAME` puts a model. It is only read; nothing here uses the network.

$HF_HUB_CACHE, or $HF_HOME/hub, or ~/.cache/huggingface/hub
    models--ORG--NAME/refs/main              the revision, 40 hexadecimal digits
    models--ORG--NAME/snapshots/REVISION/    the files, as links into models--ORG--NAME/blobs (untrusted.py)
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..text.untrusted import decoded, file_in, shown

_MODEL = re.compile(r"(\w[\w.-]{0,95})/(\w[\w.-]{0,95})", re.ASCII)
_REVISION = re.compile("[0-9a-f]{40}")


def cached_model(name: Path) -> Path | None:
    """The folder of the model ORG/NAME in the cache; None if the cache does not have it, or if `name` is not ORG/NAME."""
    match = _MODEL.fullmatch(name.as_posix())
    if match is None:
        return None
    model = cache_folder() / f"models--{match[1]}--{match[2]}"
    if not (model / "refs" / "main").exists():
        return None
    revision = decoded(file_in(model / "refs", "main")).strip()
    if not _REVISION.fullmatch(revision):
        raise ValueError(
            f"{model / 'refs' / 'main'}: got {shown(revision)}; accepted: a revision of 40 hexadecimal digits"
        )
    folder = model / "snapshots" / revision
    if folder.resolve() != model.resolve() / "snapshots" / revision:
        raise ValueError(f"{folder}: got a link to {folder.resolve()}; accepted: a folder of the cache")
    return folder if (folder / "config.json").exists() else None


def cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    hub = Path(os.environ.get("HF_HOME") or f"{home}/huggingface") / "hub"
    return Path(os.environ.get("HF_HUB_CACHE") or hub).expanduser()


def how_to_download(name: Path) -> str:
    """The end of an error about a name that is neither a folder nor in the cache; "" if the name is not ORG/NAME."""
    match = _MODEL.fullmatch(name.as_posix())
    if match is None:
        return ""
    where = f"; if it is a model of Hugging Face, which {cache_folder()} does not have, download it first: "
    return f"{where}hf download {match[0]} --local-dir {match[2]}, and give {match[2]}"
