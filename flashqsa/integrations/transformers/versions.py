"""Which Transformers releases are supported, and how they spell a sparse layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from flashqsa.integrations.transformers.errors import UnsupportedModelError, UnsupportedTransformersError
from flashqsa.values import MAX_HEADS_PER_KV_HEAD, MAX_TOP_BLOCKS, QsaSpec

FIRST, BEFORE = (5, 16), (5, 25)
SUPPORTED = f">={FIRST[0]}.{FIRST[1]},<{BEFORE[0]}.{BEFORE[1]}"
"""Transformers releases this integration was tested with: `qwen4_exp` came with 5.16."""

SPARSE_LAYER_TYPES = frozenset(
    {
        "full_attention",
        "qwen_sparse_attention",
        "indexed_attention",
        "deepseek_sparse_attention",
        "hybrid_indexed",
    }
)
"""Every spelling of a QSA layer in a config: checkpoints write the first, 5.16 and 5.17 the second, 5.18 the third."""

PORTABLE_LAYER_TYPE = "full_attention"
"""The one spelling that the `qwen4_exp` config of every supported release takes."""

OTHER_LAYER_TYPES = frozenset({"linear_attention"})

INDEXER_FIELDS = {
    "indexer_n_heads": "index_heads",
    "indexer_kv_heads": None,
    "indexer_head_dim": "index_dim",
    "indexer_budget": None,
    "indexer_compress_ratio": "block_tokens",
}
"""Config fields a QSA layer needs, and the `QsaSpec` fields they become (None: they are checked, or derived from)."""

MODEL_TYPES = ("qwen4_exp", "qwen4_exp_text")

# These recompute the angles of all positions when a sequence grows; block keys are rotated once, when they are written.
UNSUPPORTED_ROPE_TYPES = frozenset({"dynamic", "longrope"})


def check_version(found: str) -> tuple[int, int]:
    """(major, minor) of a Transformers version, or UnsupportedTransformersError outside the supported range.

    >>> check_version("5.17.0")
    (5, 17)
    """
    match = re.match(r"(\d+)\.(\d+)", found)
    release = (int(match[1]), int(match[2])) if match else None
    if release is None or not FIRST <= release < BEFORE:
        raise UnsupportedTransformersError(f"transformers: wanted {SUPPORTED}; got {found}")
    return release


def require_transformers() -> tuple[int, int]:
    """(major, minor) of the installed Transformers, or UnsupportedTransformersError."""
    try:
        found = version("transformers")
    except PackageNotFoundError as error:
        raise UnsupportedTransformersError(
            f"transformers: wanted {SUPPORTED}; got none (pip install 'flashqsa[transformers]')"
        ) from error
    return check_version(found)


def text_config(config: Any) -> dict[str, Any]:
    """The text model's fields of a config object, or of the dict of a `config.json`.

    Raises UnsupportedModelError for anything else.
    """
    if not isinstance(config, Mapping) and not callable(getattr(config, "to_dict", None)):
        wanted = "a config object, or the dict of a config.json"
        raise UnsupportedModelError(f"config: wanted {wanted}; got {type(config).__name__}")
    fields = dict(config) if isinstance(config, Mapping) else dict(config.to_dict())
    inner = fields.get("text_config")
    return dict(inner) if isinstance(inner, Mapping) else fields


def sparse_layer_ids(config: Any) -> list[int]:
    """Indices of a config's QSA layers, however its release spells them.

    Takes a config object or the dict of a `config.json`. Without `layer_types`, every `full_attention_interval`-th
    layer (4 by default) is one. Raises UnsupportedModelError for an unknown layer type, and where none is sparse.

    >>> sparse_layer_ids({"num_hidden_layers": 4, "layer_types": ["linear_attention", "indexed_attention"] * 2})
    [1, 3]
    """
    fields = text_config(config)
    types = fields.get("layer_types")
    if types is None:
        interval = int(fields.get("full_attention_interval") or 4)
        found = list(range(interval - 1, int(fields.get("num_hidden_layers") or 0), interval))
    else:
        unknown = sorted(set(types) - SPARSE_LAYER_TYPES - OTHER_LAYER_TYPES)
        if unknown:
            known = ", ".join(sorted(SPARSE_LAYER_TYPES | OTHER_LAYER_TYPES))
            raise UnsupportedModelError(f"config.layer_types: wanted {known}; got {', '.join(unknown)}")
        found = [index for index, kind in enumerate(types) if kind in SPARSE_LAYER_TYPES]
    if not found:
        raise UnsupportedModelError("config.layer_types: wanted at least one sparse layer; got none")
    return found


def spec_of_config(config: Any) -> QsaSpec:
    """The shape of a config's QSA layers, or UnsupportedModelError naming the field that is missing or wrong.

    Takes a config object or the dict of a `config.json`.
    """
    fields = text_config(config)
    missing = [name for name in INDEXER_FIELDS if not isinstance(fields.get(name), int)]
    if missing:
        raise UnsupportedModelError(f"config: wanted the indexer fields {', '.join(missing)}; got none")
    values = {name: int(fields[name]) for name in INDEXER_FIELDS}
    for name, value in values.items():
        if value < 1:
            raise UnsupportedModelError(f"config.{name}: wanted a whole number of at least 1; got {value}")
    if values["indexer_kv_heads"] != 1:
        raise UnsupportedModelError(f"config.indexer_kv_heads: wanted 1; got {values['indexer_kv_heads']}")
    ratio, budget = values["indexer_compress_ratio"], values["indexer_budget"]
    if budget % ratio:
        raise UnsupportedModelError(f"config.indexer_budget: wanted a multiple of {ratio} tokens; got {budget}")
    if budget // ratio > MAX_TOP_BLOCKS:
        wanted = f"at most {MAX_TOP_BLOCKS} blocks of {ratio} tokens"
        raise UnsupportedModelError(f"config.indexer_budget: wanted {wanted}; got {budget}")
    q_heads, kv_heads = int(fields["num_attention_heads"]), int(fields["num_key_value_heads"])
    if q_heads % kv_heads or q_heads // kv_heads > MAX_HEADS_PER_KV_HEAD:
        wanted = f"a multiple of {kv_heads} KV heads, at most {MAX_HEADS_PER_KV_HEAD} times as many"
        raise UnsupportedModelError(f"config.num_attention_heads: wanted {wanted}; got {q_heads}")
    rope = str((fields.get("rope_parameters") or {}).get("rope_type", "default"))
    if rope in UNSUPPORTED_ROPE_TYPES:
        wanted = "a rotary embedding whose angles depend on the position alone"
        raise UnsupportedModelError(f"config.rope_parameters: wanted {wanted}; got rope_type {rope}")
    head_dim = fields.get("head_dim") or int(fields["hidden_size"]) // q_heads
    return QsaSpec(
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=int(head_dim),
        index_heads=values["indexer_n_heads"],
        index_dim=values["indexer_head_dim"],
        block_tokens=ratio,
        top_blocks=budget // ratio,
    )


def portable_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The dict of a `config.json` with its sparse layers spelled so that every supported release loads it.

    Releases before 5.18 refuse `indexed_attention`, later ones refuse `qwen_sparse_attention`; all of them take
    `full_attention`. Raises UnsupportedModelError as `sparse_layer_ids` and `spec_of_config` do.
    """
    sparse_layer_ids(config)
    spec_of_config(config)

    def spelled(fields: Mapping[str, Any]) -> dict[str, Any]:
        changed = dict(fields)
        if isinstance(changed.get("text_config"), Mapping):
            changed["text_config"] = spelled(changed["text_config"])
        if changed.get("layer_types") is not None:
            sparse = SPARSE_LAYER_TYPES
            changed["layer_types"] = [
                PORTABLE_LAYER_TYPE if kind in sparse else kind for kind in changed["layer_types"]
            ]
        return changed

    return spelled(config)
