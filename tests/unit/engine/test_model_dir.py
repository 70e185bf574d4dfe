"""Model directories: which model it is follows from its bytes, and names from outside stay inside the home."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shared import model_dir
from shared.errors import ModelNotFound
from shared.model_dir import (
    ModelDirectory,
    directory_name,
    find_model,
    find_tokenizer,
    models_home,
    read_model_directory,
)
from tests.tiny_model import write_config


@pytest.fixture
def copied(tiny: ModelDirectory, tmp_path: Path) -> Path:
    """The tiny model under a home."""
    path = models_home(tmp_path) / "copied"
    shutil.copytree(tiny.path, path)
    return path


def test_the_fingerprint_is_that_of_the_bytes(tiny: ModelDirectory, copied: Path, tmp_path: Path) -> None:
    """Another path is the same model; another config or other weights are not, and are noticed after a change in place."""
    found = find_model("copied", tmp_path)
    assert (found.name, found.path) == ("copied", copied)
    assert (found.fingerprint, found.tokenizer_digest) == (tiny.fingerprint, tiny.tokenizer_digest)
    assert find_tokenizer("copied", tmp_path).tokenizer_digest == tiny.tokenizer_digest
    write_config(copied, rope_theta=5.0)
    changed = find_model("copied", tmp_path).fingerprint
    assert changed != tiny.fingerprint
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert find_model("copied", tmp_path).fingerprint not in (changed, tiny.fingerprint)


def test_weights_are_read_once(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts take seconds: the fingerprint of large weights is kept while the files are the same."""
    first = read_model_directory(copied, tmp_path)

    def not_again(path: Path) -> dict[str, object]:
        raise AssertionError("the weights were read again")

    monkeypatch.setattr(model_dir, "identify", not_again)
    assert read_model_directory(copied, tmp_path) == first


def test_what_is_not_there_is_said_with_where_it_was_looked_for(copied: Path, tmp_path: Path) -> None:
    """A typo, and a directory without weights."""
    with pytest.raises(ModelNotFound, match="copid"):
        find_model("copid", tmp_path)
    (copied / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound):
        find_model("copied", tmp_path)
    assert find_tokenizer("copied", tmp_path).path == copied


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("org/model", "org--model"),
        ("/some/where/Model.Q4.gguf", "Model.Q4"),
        ("../../etc", "--..--etc"),
        ("..", "model"),
        ("", "model"),
    ],
)
def test_names_stay_inside_the_home(model: str, name: str) -> None:
    """ROOST_MODEL comes from outside."""
    assert directory_name(model) == name
