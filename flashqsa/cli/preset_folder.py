"""A preset written to a folder, with a tokenizer of bytes, for programs that load a model from disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flashqsa.cli.presets import BYTE_TOKENS, CPU, SPECIAL_TOKENS, Place, load_preset, transformers_module
from flashqsa.cli.show import UserError

SPECIAL_NAMES = ("<|end|>", "<|pad|>")
"""Texts of the first special tokens; the others are unused."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_preset(
    name: str, folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0, place: Place = CPU
) -> None:
    """Writes a preset's model and tokenizer, as `from_pretrained` reads them. Raises UserError.

    name    of `presets.PRESETS`
    folder  an existing one
    dtype   of the weights, which are random: the same for the same seed, torch build, dtype and kind of device
    place   where they are made, and how many layers
    """
    loaded = load_preset(name, dtype, seed, place)
    loaded.model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def byte_tokenizer() -> Any:
    """A tokenizer of Transformers whose tokens are the bytes of UTF-8, as in `presets.encode_bytes`, with a template
    for chats. Raises UserError where the package `tokenizers` is missing."""
    transformers = transformers_module()
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    except ImportError as error:
        raise UserError(f"a preset's tokenizer needs the package tokenizers: {error}") from error
    shown = _shown_bytes()
    names = [*SPECIAL_NAMES, *(f"<|unused-{index}|>" for index in range(len(SPECIAL_NAMES), SPECIAL_TOKENS))]
    vocabulary = {text: token for token, text in enumerate([*shown, *names])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in names])
    end, pad = SPECIAL_NAMES
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=pad)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _shown_bytes() -> list[str]:
    """The character that stands for each byte in the vocabulary of a byte-level tokenizer (GPT-2's).

    Bytes that print stand for themselves, the others for the characters from U+0100 on, in order.
    """
    printed = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(BYTE_TOKENS, 2 * BYTE_TOKENS))
    return [chr(byte if byte in printed else next(others)) for byte in range(BYTE_TOKENS)]
