"""How many tokens a step of a server with drafts makes, as servers report it.

vLLM counts drafts and accepted tokens, SGLang shows a length, on their pages of Prometheus metrics; llama.cpp's server
tells tokens and accepted drafts with the last chunk of a stream.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"
LENGTH = "sglang:spec_accept_length"
PAGE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Counters:
    """What a page of metrics says, summed over engines.

    drafts    steps that drafted, and draft tokens that were `accepted`, since the server started
    length    tokens per step lately, the mean over engines; None where the page has none
    """

    drafts: float = 0.0
    accepted: float = 0.0
    length: float | None = None


def counters_in(page: str) -> Counters:
    """The counters of a page; zeros where it has none. Raises ValueError for what is no page of metrics.

    >>> counters_in('# TYPE sglang:spec_accept_length gauge\\nsglang:spec_accept_length{tp_rank="0"} 2.5\\n').length
    2.5
    """
    found: dict[str, list[float]] = {DRAFTS: [], ACCEPTED: [], LENGTH: []}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name in found and math.isfinite(sample.value):
                found[sample.name].append(sample.value)
    lengths = found[LENGTH]
    return Counters(sum(found[DRAFTS]), sum(found[ACCEPTED]), sum(lengths) / len(lengths) if lengths else None)


def read_counters(client: httpx.Client, address: str | None) -> Counters | None:
    """The page at an address; None without an address, and where it cannot be read now."""
    if address is None:
        return None
    try:
        answer = client.get(address, timeout=PAGE_TIMEOUT_S)
        return counters_in(answer.text) if answer.status_code == httpx.codes.OK else None
    except (httpx.HTTPError, ValueError):
        return None


def between(before: Counters | None, after: Counters | None) -> float | None:
    """Tokens per step between two readings: the accepted ones, and the one that every step adds.

    >>> between(Counters(10, 5), Counters(30, 35))
    2.5
    """
    if before is None or after is None:
        return None
    drafts = after.drafts - before.drafts
    return 1 + (after.accepted - before.accepted) / drafts if drafts > 0 else after.length


def in_timings(timings: Mapping[str, Any]) -> float | None:
    """Tokens per step from llama.cpp's `timings`.

    >>> in_timings({"predicted_n": 16, "draft_n": 12, "draft_n_accepted": 8})
    2.0
    """
    tokens, accepted = timings.get("predicted_n"), timings.get("draft_n_accepted")
    if not isinstance(tokens, int) or not isinstance(accepted, int) or accepted >= tokens:
        return None
    return tokens / (tokens - accepted)
