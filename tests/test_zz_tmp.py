import sys, os; sys.path[:0]=["tests"]
import tempfile, pytest
from pathlib import Path
from support.pairwise import covering
from support.run_keys import AXES, allowed
import train.test_every_key as t
def test_some(tmp_path_factory, tmp_path, monkeypatch):
    texts = t.texts.__wrapped__(tmp_path_factory) if hasattr(t.texts, "__wrapped__") else t.texts.__pytest_wrapped__.obj(tmp_path_factory)
    rows = [r for r in covering(AXES, allowed, 7) if r["lora.rank"] or r["train.freeze"] != "[]"][:14]
    monkeypatch.setattr(t.loop, "tensorboard_installed", lambda: False)
    print(t.check_rows(rows, texts, tmp_path, monkeypatch))
