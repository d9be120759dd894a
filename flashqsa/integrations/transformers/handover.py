"""Calls that are left to the stock layer: each reason is logged once per process, and counted."""

from __future__ import annotations

import logging
from collections import Counter

import torch

logger = logging.getLogger("flashqsa")

_counts: Counter[str] = Counter()


def hand_overs() -> dict[str, int]:
    """How many layer calls of this process the stock layer ran, by reason; not those under torch.compile."""
    return dict(_counts)


def note_hand_over(reason: str) -> None:
    """Counts a call of the stock layer; the first one for a reason is logged as a warning."""
    if torch.compiler.is_compiling():
        return
    _counts[reason] += 1
    if _counts[reason] == 1:
        logger.warning("transformers: the stock sparse layer runs instead of FlashQSA: %s", reason)
