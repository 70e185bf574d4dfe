"""Text <-> token ids, without torch. The only importer of `tokenizers`.

Content never becomes control tokens: `encode_content` treats `<|im_end|>` in a tool's output as the literal text it is
(failure catalogue F-SEC-03); only `encode_markup`, used for the chat template's own text, makes special ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer as FastTokenizer

from shared.errors import RoostError
from shared.memory import release_free_memory

# A character is at most this many tokens long in a byte-level vocabulary, plus one for what follows it.
HELD_TOKENS_MAX: Final = 8


class TokenizerError(RoostError):
    """The tokenizer's files are missing or do not fit each other."""


class Tokenizer:
    """One vocabulary. Not thread-safe: it belongs to one event loop."""

    def __init__(
        self, fast: FastTokenizer, *, chat_template: str, eos_token_ids: frozenset[int], bos_token: str
    ) -> None:
        self._fast = fast
        self.chat_template = chat_template
        self.eos_token_ids = eos_token_ids
        self.bos_token = bos_token
        self._special = frozenset(
            token_id for token_id, token in fast.get_added_tokens_decoder().items() if token.special
        )
        assert eos_token_ids, "a model that cannot end its answer"

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """From a model directory. Raises TokenizerError naming the file at fault."""
        fast_file = folder / "tokenizer.json"
        if not fast_file.is_file():
            raise TokenizerError(f"{fast_file} is missing")
        fast = FastTokenizer.from_file(str(fast_file))
        # Parsing a vocabulary takes some 15 MB more than keeping it.
        release_free_memory()
        fast.no_padding()
        fast.no_truncation()
        config = _json(folder / "tokenizer_config.json")
        template_file = folder / "chat_template.jinja"
        template = template_file.read_text() if template_file.is_file() else config.get("chat_template")
        if not isinstance(template, str):
            raise TokenizerError(f"{folder} has no chat template (chat_template.jinja or tokenizer_config.json)")
        eos = _eos_ids(fast, folder, config)
        if not eos:
            raise TokenizerError(f"{folder} names no end-of-sequence token")
        return cls(fast, chat_template=template, eos_token_ids=eos, bos_token=_token_text(config.get("bos_token")))

    def encode_content(self, text: str) -> tuple[int, ...]:
        """Ids of untrusted text; control tokens in it stay text."""
        self._fast.encode_special_tokens = True
        return tuple(self._fast.encode(text, add_special_tokens=False).ids)

    def encode_markup(self, text: str) -> tuple[int, ...]:
        """Ids of the template's own text; control tokens in it are control tokens. Never adds a BOS of its own (F-TOK-03)."""
        self._fast.encode_special_tokens = False
        return tuple(self._fast.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: tuple[int, ...] | list[int]) -> str:
        """Text of the ids, control tokens left out."""
        text: str = self._fast.decode(list(token_ids), skip_special_tokens=True)
        return text

    def is_special(self, token_id: int) -> bool:
        """Whether it is a control token."""
        return token_id in self._special

    def text_of_special(self, token_id: int) -> str:
        """How a control token is written in a template."""
        return str(self._fast.id_to_token(token_id) or "")


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    loaded = json.loads(path.read_text())
    return loaded if isinstance(loaded, dict) else {}


def _token_text(token: Any) -> str:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _eos_ids(fast: FastTokenizer, folder: Path, config: dict[str, Any]) -> frozenset[int]:
    """From generation_config.json, config.json and the tokenizer's own eos_token; all of them end an answer."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _json(folder / name).get("eos_token_id")
        found.update(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
    own = fast.token_to_id(_token_text(config.get("eos_token"))) if config.get("eos_token") else None
    return frozenset(found | ({own} if own is not None else set()))


class IncrementalDecoder:
    """Token ids in, text out as it becomes final, never half a character. Joined pieces == `Tokenizer.decode` of all.

    Two offsets into the ids, as in the usual sliding-window scheme: text up to `_read` was given out; decoding starts at
    `_prefix`, a little earlier, since some tokenizers write a token differently at the start of a string.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0

    def feed(self, token_id: int) -> str:
        """The text that became final with this token; empty while a character is incomplete."""
        self._ids.append(token_id)
        known = self._tokenizer.decode(self._ids[self._prefix : self._read])
        now = self._tokenizer.decode(self._ids[self._prefix :])
        is_torn = now.endswith("\ufffd") and len(self._ids) - self._read < HELD_TOKENS_MAX
        if len(now) <= len(known) or is_torn:
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return now[len(known) :]

    def flush(self) -> str:
        """What is left, with the replacement character for a torn end."""
        known = self._tokenizer.decode(self._ids[self._prefix : self._read])
        now = self._tokenizer.decode(self._ids[self._prefix :])
        self._prefix = self._read = len(self._ids)
        return now[len(known) :]
