"""FlashQSA: Qwen Sparse Attention, exact, repeatable and fast.

Importing this package touches no GPU and imports no kernel: public names are found when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from flashqsa.check import InputError
    from flashqsa.device import DeviceFacts
    from flashqsa.knobs import KnobError
    from flashqsa.merge import merge_lse
    from flashqsa.pipeline import (
        plan_batch,
        prepare,
        qsa_attention,
        select_blocks,
        sparse_attention,
        write_index_keys,
        write_kv,
    )
    from flashqsa.plan import Plan
    from flashqsa.route import Call, Decision, NoRouteError, Route, choose_route
    from flashqsa.support import Support, device_supported
    from flashqsa.values import IndexCache, KvCache, Projected, QsaSpec, Rows, Run, Scores, Selection

_HOMES = {
    "Call": "route",
    "Decision": "route",
    "DeviceFacts": "device",
    "IndexCache": "values",
    "InputError": "check",
    "KnobError": "knobs",
    "KvCache": "values",
    "NoRouteError": "route",
    "Plan": "plan",
    "Projected": "values",
    "QsaSpec": "values",
    "Route": "route",
    "Rows": "values",
    "Run": "values",
    "Scores": "values",
    "Selection": "values",
    "Support": "support",
    "choose_route": "route",
    "device_supported": "support",
    "merge_lse": "merge",
    "plan_batch": "pipeline",
    "prepare": "pipeline",
    "qsa_attention": "pipeline",
    "select_blocks": "pipeline",
    "sparse_attention": "pipeline",
    "write_index_keys": "pipeline",
    "write_kv": "pipeline",
}

__all__ = [
    "Call",
    "Decision",
    "DeviceFacts",
    "IndexCache",
    "InputError",
    "KnobError",
    "KvCache",
    "NoRouteError",
    "Plan",
    "Projected",
    "QsaSpec",
    "Route",
    "Rows",
    "Run",
    "Scores",
    "Selection",
    "Support",
    "__version__",
    "choose_route",
    "device_supported",
    "merge_lse",
    "plan_batch",
    "prepare",
    "qsa_attention",
    "select_blocks",
    "sparse_attention",
    "write_index_keys",
    "write_kv",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'flashqsa' has no attribute {name!r}")
    return getattr(import_module(f"flashqsa.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
