"""Frozen kernel configurations: what is legal (one predicate) and what is preferred (data, in `tables/`)."""

from __future__ import annotations

from dataclasses import dataclass

from flashqsa.device import DeviceFacts
from flashqsa.tables import cpu as cpu_table

MAX_GROUP_ROWS = 64
"""A worklist entry carries one 64-bit word of row bits."""


@dataclass(frozen=True)
class GroupCost:
    """What a group of rows costs, for choosing group sizes by the unions they would read.

    group_us    fixed part of a group, in microseconds
    gather_ns   nanoseconds per element of a token's key (kv_heads * head_dim) in the union: the gather of its key and
                value, and what a product costs however few rows it serves
    product_ns  nanoseconds per element of a row's query (q_heads * head_dim) and token of the union: both products

    >>> GroupCost(group_us=100.0, gather_ns=1.0, product_ns=0.1).of(2, 1000, query_size=64, key_size=16)
    128.8
    """

    group_us: float
    gather_ns: float
    product_ns: float

    def of(self, rows: int, tokens: int, query_size: int, key_size: int) -> float:
        """Microseconds of a group of `rows` rows whose union holds `tokens` tokens."""
        return self.group_us + 1e-3 * tokens * (self.gather_ns * key_size + self.product_ns * rows * query_size)


@dataclass(frozen=True)
class AttendConfig:
    """How the attention stage of a kernel set cuts its work.

    group_rows   group sizes it may use, ascending, each a multiple of the one before; the CPU set picks among them by
                 the union each would read
    tile_tokens  most tokens of a group's union gathered at a time
    row_tokens   most logits per query head of one softmax: a group of n rows takes row_tokens / n tokens of its union
                 at once, and merges what is beyond
    cost         what a group costs
    """

    group_rows: tuple[int, ...]
    tile_tokens: int
    row_tokens: int
    cost: GroupCost


def config_refusal(config: AttendConfig, facts: DeviceFacts) -> str | None:
    """Why `config` cannot run on a device, or None when it can."""
    if not config.group_rows or list(config.group_rows) != sorted(set(config.group_rows)):
        return f"group sizes must ascend, got {config.group_rows}"
    if config.group_rows[0] < 1 or config.group_rows[-1] > MAX_GROUP_ROWS:
        return f"groups hold 1 to {MAX_GROUP_ROWS} rows, got {config.group_rows}"
    if any(large % small for small, large in zip(config.group_rows, config.group_rows[1:], strict=False)):
        return f"each group size must divide the next, got {config.group_rows}"
    if min(config.tile_tokens, config.row_tokens) < 1:
        return f"a tile and a softmax hold at least one token, got {config.tile_tokens} and {config.row_tokens}"
    if facts.kind != "cpu":
        return f"no configuration is made for {facts.arch}"
    return None


def attend_config(mode: str, facts: DeviceFacts) -> AttendConfig:
    """The preferred legal configuration of an attention mode on a device.

    Raises ValueError when the table holds an illegal one.
    """
    entry = cpu_table.ATTEND[mode]
    config = AttendConfig(**entry, cost=GroupCost(**cpu_table.COST))
    refusal = config_refusal(config, facts)
    if refusal is not None:
        raise ValueError(f"{mode}: {refusal}")
    return config
