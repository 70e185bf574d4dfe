"""Make a model directory: from a GGUF file (a packaged one, or any path), or from a hub id.

    python -P -m shared.engine.convert [--model NAME_OR_PATH] [--out DIR]

GGUF weights are dequantized to float32 once, so that later starts take seconds. Any number of processes may ask at once:
one works under a file lock, the others wait and find the directory, which is renamed into place when it is complete.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from blake3 import blake3
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from shared.engine.loader import quiet_transformers
from shared.engine.spec import ModelSpec
from shared.errors import ModelNotFound, RoostError
from shared.model_dir import (
    RECORD_NAME,
    ModelDirectory,
    directory_name,
    find_model,
    identify,
    is_model_directory,
    models_home,
    packaged_file,
    read_model_directory,
)
from shared.settings import DEFAULT_MODEL, RoostSettings, read_settings

Say = Callable[[str], None]

# Splitters that the GGUF field tokenizer.ggml.pre stands for and transformers' reader leaves out: every digit by itself.
_DIGITS: Final = {"type": "Digits", "individual_digits": True}
_SPLITTERS: Final = {"smollm": [_DIGITS]}
_HUB_FILES: Final = ["*.json", "*.safetensors", "*.jinja"]


def _silent(_: str) -> None:
    """Say nothing."""


def ensure_model(model: str, home: Path, *, say: Say = _silent) -> ModelDirectory:
    """The model directory for ROOST_MODEL=`model`, made under `home`/models if it is not there yet.

    Blocks for as long as it takes, or as another process takes. Raises ModelNotFound, UnsupportedModel, OSError.
    """
    try:
        return find_model(model, home)
    except ModelNotFound as missing:
        out = models_home(home) / directory_name(model)
        looked = missing.looked
    make(model, out, looked=looked, say=say)
    return read_model_directory(out, home)


def make(model: str, out: Path, *, looked: tuple[str, ...] = (), say: Say = _silent) -> None:
    """Fill `out`, unless it is there. See the module's docstring."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with _lock(out.parent / f".{out.name}.lock", say):
        if is_model_directory(out):
            say(f"{out} is there")
            return
        for left_behind in out.parent.glob(f".{out.name}.*.partial"):
            shutil.rmtree(left_behind)
        partial = out.parent / f".{out.name}.{os.getpid()}.partial"
        partial.mkdir()
        try:
            origin = _fill(model, partial, looked, say)
            record = {"name": directory_name(model), **origin, **identify(partial)}
            (partial / RECORD_NAME).write_text(json.dumps(record, indent=1), encoding="utf-8")
            partial.rename(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        say(f"{out} is ready")


@contextmanager
def _lock(path: Path, say: Say) -> Iterator[None]:
    """Hold an exclusive lock on the file; a dead holder's lock is gone."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process makes this model, waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fill(model: str, out: Path, looked: tuple[str, ...], say: Say) -> dict[str, Any]:
    """Write the checkpoint's files; answer what they were made from."""
    path = Path(model).expanduser()
    file = path if path.suffix == ".gguf" and path.is_file() else packaged_file(model)
    if file is not None:
        say(f"reading {file.name}")
        convert_gguf(file, out)
        say("writing the fingerprint")
        return {"source": file.name, "source_digest": identify_file(file)}
    try:
        say(f"fetching {model}")
        snapshot_download(model, local_dir=out, allow_patterns=_HUB_FILES)
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError) as missing:
        raise ModelNotFound(model, (*looked, "the model hub")) from missing
    if not is_model_directory(out):
        raise ModelNotFound(model, (*looked, "the model hub (no safetensors or no tokenizer.json there)"))
    return {"source": model}


def identify_file(file: Path) -> str:
    """blake3 of a file."""
    return blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest()


def convert_gguf(file: Path, out: Path) -> None:
    """Write weights (float32), config, tokenizer and generation config of a GGUF file into the directory `out`.

    Raises UnsupportedModel, or ValueError for an architecture that transformers cannot read from GGUF.
    """
    quiet_transformers()
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    ModelSpec.from_config(config.to_dict())
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    # transformers' from_pretrained(gguf_file=) needs accelerate for the same reading.
    tensors = _read_gguf(file, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    tied = set(model.all_tied_weights_keys)
    if unexpected or set(missing) - tied:
        raise ValueError(f"{file.name} does not fit {type(model).__name__}: {sorted(set(missing) - tied)} {unexpected}")
    model.tie_weights()
    model.generation_config = GenerationConfig.from_model_config(config)
    model.save_pretrained(out)
    for weights in out.glob("*.safetensors"):
        weights.chmod(0o644)  # safetensors makes them private; services may run as another user
    _write_tokenizer(file, out)


def _read_gguf(file: Path, **options: Any) -> dict[str, Any]:
    """transformers' reader: metadata by kind, and with return_tensors the weights under the model's own names."""
    content: dict[str, Any] = load_gguf_checkpoint(str(file), **options)  # type: ignore[no-untyped-call]
    return content


def _write_tokenizer(file: Path, out: Path) -> None:
    """Tokenizer and chat template, with the splitters that the GGUF reader leaves out."""
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(out)
    kind = _read_gguf(file)["tokenizer"].get("pre_tokenizer_type")
    if kind not in _SPLITTERS:
        return
    path = out / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    present = tokenizer["pre_tokenizer"]
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*_SPLITTERS[kind], present]}
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


def main() -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -P -m shared.engine.convert", description=make.__doc__)
    parser.add_argument(
        "--model", help=f"name, GGUF path or hub id; else ROOST_MODEL, which defaults to {DEFAULT_MODEL}"
    )
    parser.add_argument("--out", type=Path, help="directory to make; else $ROOST_HOME/models/<name>")
    arguments = parser.parse_args()
    settings = read_settings(RoostSettings)
    model = arguments.model or settings.model
    console = Console()
    try:
        with console.status(f"model {model}") as status:
            if arguments.out is not None:
                make(model, arguments.out.absolute(), say=status.update)
                path = arguments.out.absolute()
            else:
                path = ensure_model(model, settings.home_path, say=status.update).path
    except (RoostError, OSError, ValueError) as wrong:
        Console(stderr=True).print(str(wrong), markup=False, soft_wrap=True)
        return 1
    console.print(f"{model}: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
