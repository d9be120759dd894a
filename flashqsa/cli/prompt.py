"""The prompt of `flashqsa run`: a file, standard input, or the text that comes with Python."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flashqsa.cli.show import UserError

DEFAULT_TOKENS = 8192
"""Tokens of the built-in text that are used where nothing else is asked."""


@dataclass(frozen=True)
class Prompt:
    """The tokens to prefill.

    source      where the text came from
    text_bytes  length of the whole text in UTF-8
    tokens      token ids, cut to what was asked
    """

    source: str
    text_bytes: int
    tokens: list[int]


def builtin_text() -> str:
    """The language reference that every Python carries for its `help()`: about 450 kB of English in topics."""
    from pydoc_data import topics

    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics))


def read_prompt(source: str | None, tokens: int | None, encode: Callable[[str], list[int]]) -> Prompt:
    """The prompt from a file, from standard input (`-`) or built in (None), cut to `tokens`.

    Without `tokens` a file or standard input is taken whole, and the built-in text up to DEFAULT_TOKENS. Raises
    UserError for a file that cannot be read, for a prompt without tokens, and for one shorter than asked: no text is
    repeated to fill a length.
    """
    if tokens is not None and tokens < 1:
        raise UserError(f"--tokens: wanted at least 1; got {tokens}")
    if source is None:
        name, text = "the Python language reference (pydoc_data.topics)", builtin_text()
        wanted: int | None = DEFAULT_TOKENS if tokens is None else tokens
    else:
        name, text = _read(source)
        wanted = tokens
    ids = encode(text)
    if not ids:
        raise UserError(f"the prompt from {name} is empty")
    if wanted is not None and len(ids) < wanted:
        limit = f"{name} has {len(ids):,} tokens ({len(text.encode()):,} bytes)"
        raise UserError(f"--tokens {wanted}: {limit}; ask for at most {len(ids)} or give a longer prompt")
    return Prompt(name, len(text.encode()), ids[:wanted])


def _read(source: str) -> tuple[str, str]:
    try:
        if source == "-":
            return "standard input", sys.stdin.read()
        return source, Path(source).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"prompt {source}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"prompt {source}: not UTF-8 text ({error.reason} at byte {error.start})") from error
