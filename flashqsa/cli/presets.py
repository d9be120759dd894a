"""Qwen4-Exp models for the command line: random presets with the real sparse geometry, or a folder on disk.

A preset is small everywhere but in what FlashQSA computes: it keeps the released model's heads, index heads, budget,
rotary share and theta, so its sparse layers do the real layers' work. Its tokens are the bytes of UTF-8 text.
`released` has every layer as wide as the released model's, and as many layers as asked for, or as memory holds.
`released-64` is the same with 64 of its 512 experts in each layer: a token still goes through ten of them, and the
whole depth of 48 layers takes an eighth of the memory that experts fill.

How much work that is depends on how much neighbouring rows share, and with purely random weights they share no more
than chance has it. All presets but `demo-apart` therefore give every token embedding a common part, as large as makes
selections overlap like those published for the released model near 7,500 tokens. `flashqsa stats` shows the figures; in
rows 6,144 to 8,191 of the built-in text they are, with seed 0,

                  neighbours' Jaccard   union of 2 / 4 / 8 / 16 rows, in selections
    published     0.73                  1.16 / 1.43 / 1.83 / 2.30
    demo          0.62                  1.24 / 1.50 / 1.83 / 2.19
    demo-apart    0.20                  1.70 / 2.52 / 3.16 / 3.44
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from flashqsa.cli.bench_inputs import free_bytes
from flashqsa.cli.show import UserError

MODEL_TYPES = ("qwen4_exp", "qwen4_exp_text")
BYTE_TOKENS = 256
SPECIAL_TOKENS = 8
"""Ids from 256 on; 256 is the end of text, 257 is padding, the rest is unused."""

_SPARSE_GEOMETRY: Mapping[str, Any] = MappingProxyType(
    {
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
    }
)
_SMALL_GEOMETRY: Mapping[str, Any] = MappingProxyType(
    {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 32,
        "indexer_compress_ratio": 4,
    }
)

_SMALL_REST: Mapping[str, Any] = MappingProxyType(
    {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "hc_count": 2,
        "hc_lowrank": 32,
    }
)
# config.json of Qwen3.8-Flash-Next. Its n-gram embeddings (51 G parameters), its vision part and its drafting layer
# are left out: no layer's own work depends on them.
_RELEASED_REST: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 248320,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 640,
        "shared_expert_intermediate_size": 640,
        "hc_count": 4,
        "hc_lowrank": 320,
    }
)
RELEASED_LAYERS, RELEASED_HIDDEN_SIZE = 48, 2560
LAYER_PERIOD = 4
"""Every fourth layer is sparse."""


@dataclass(frozen=True)
class Preset:
    """A random model.

    geometry       the sparse layers' part of the configuration
    hidden_size    width of the residual stream
    layers         decoder layers; every fourth is sparse, the others are gated delta-nets
    common         size of the part that all token embeddings share, as a multiple of each one's own
    line           what it is for
    rest           the other layers' part of the configuration
    fits_memory    whether it has as many layers as memory holds, `layers` at most, where nobody says how many
    """

    geometry: Mapping[str, Any]
    hidden_size: int
    layers: int
    common: float
    line: str
    rest: Mapping[str, Any] = field(default_factory=lambda: _SMALL_REST)
    fits_memory: bool = False

    def fields(self, layers: int | None = None) -> dict[str, Any]:
        """The fields of a Qwen4ExpTextConfig, with another number of layers where one is given."""
        count = self.layers if layers is None else layers
        kinds = ("linear_attention",) * (LAYER_PERIOD - 1) + ("full_attention",)
        layer_types = [kinds[index % LAYER_PERIOD] for index in range(count)]
        return {
            **self.geometry,
            "vocab_size": BYTE_TOKENS + SPECIAL_TOKENS,
            "eos_token_id": BYTE_TOKENS,
            "pad_token_id": BYTE_TOKENS + 1,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": count,
            # Every Transformers that knows this model maps this spelling to its own name of the sparse layer.
            "layer_types": layer_types,
            "max_position_embeddings": 1 << 20,
            # What Transformers takes by default; vLLM wants it said.
            "output_gate_type": "silu",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
                "mrope_section": _mrope_section(self.geometry["head_dim"] // 8),
                "mrope_interleaved": True,
            },
            **self.rest,
        }


def _mrope_section(pairs: int) -> list[int]:
    """Rotary pairs of the three position axes, as near to equal as they come: [11, 11, 10] of 32."""
    each, left = divmod(pairs, 3)
    return [each + (axis < left) for axis in range(3)]


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "demo": Preset(_SPARSE_GEOMETRY, 256, 4, 3.0, "the released model's sparse geometry, one sparse layer of four"),
        "demo-2x": Preset(_SPARSE_GEOMETRY, 256, 8, 3.0, "the same with two sparse layers of eight"),
        "demo-apart": Preset(_SPARSE_GEOMETRY, 256, 4, 0.0, "as demo, with rows that share little: the worst case"),
        "tiny": Preset(_SMALL_GEOMETRY, 32, 4, 3.0, "small heads and a budget of 32 tokens, for tests in seconds"),
        "released": Preset(
            _SPARSE_GEOMETRY,
            RELEASED_HIDDEN_SIZE,
            RELEASED_LAYERS,
            3.0,
            "every layer as wide as the released model's, as many as memory holds: for a GPU of 32 GiB or more",
            _RELEASED_REST,
            fits_memory=True,
        ),
        "released-64": Preset(
            _SPARSE_GEOMETRY,
            RELEASED_HIDDEN_SIZE,
            RELEASED_LAYERS,
            3.0,
            "as released with 64 of its 512 experts a layer: the same work for a token in less memory",
            {**_RELEASED_REST, "num_experts": 64},
            fits_memory=True,
        ),
    }
)


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to run, and its tokens.

    name       the preset's name or the folder
    encode     text to token ids
    decode     token ids to text
    """

    model: Any
    name: str
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]

    @property
    def config(self) -> Any:
        """The text model's configuration."""
        return self.model.config.get_text_config()

    @property
    def parameters(self) -> int:
        """How many numbers the model has."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of the sparse layers."""
        return int(self.config.indexer_compress_ratio)

    @property
    def mixes_after_sparse(self) -> bool:
        """Whether a layer after the last sparse one carries something from row to row."""
        return str(self.config.layer_types[-1]) == "linear_attention"

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens that end a text; none for a preset, whose random weights end nothing."""
        if self.name in PRESETS:
            return frozenset()
        found = self.model.generation_config.eos_token_id
        if found is None:
            return frozenset()
        return frozenset(found if isinstance(found, list) else [found])


def transformers_module(*, quiet: bool = True) -> Any:
    """The Transformers package, or UserError where it is missing or too old for Qwen4-Exp.

    `quiet` silences its advice about faster kernels, which none of the figures here depend on.
    """
    try:
        import transformers
        from transformers.models import qwen4_exp
    except ImportError as error:
        wanted = "pip install 'flashqsa[transformers]'"
        raise UserError(f"this command needs Transformers with Qwen4-Exp ({wanted}): {error}") from error
    del qwen4_exp
    if quiet:
        transformers.logging.set_verbosity_error()
    return transformers


@dataclass(frozen=True)
class Place:
    """Where a model is to stand, and how deep a preset is to be.

    layers      how many; None for the preset's own, or as many as memory holds
    tokens      the longest context that memory must hold beside the weights
    chunk       the most rows of one pass
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    layers: int | None = None
    tokens: int = 0
    chunk: int = 0


CPU = Place()


def load_preset(name: str, dtype: torch.dtype, seed: int, place: Place = CPU) -> Loaded:
    """A preset's model with random weights: the same for the same seed, torch build, dtype and kind of device.

    Raises UserError for a name that there is not, and where memory does not hold four layers.
    """
    if name not in PRESETS:
        raise UserError(f"--preset: wanted one of {', '.join(PRESETS)}; got {name!r}")
    transformers = transformers_module()
    preset, layers = PRESETS[name], place.layers
    if layers is not None and layers < LAYER_PERIOD:
        raise UserError(f"--layers: wanted at least {LAYER_PERIOD}, of which one is sparse; got {layers}")
    if layers is None and preset.fits_memory:
        layers = layers_that_fit(preset, dtype, place)
    config = transformers.Qwen4ExpTextConfig(**preset.fields(layers))
    torch.manual_seed(seed)
    with place.device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        with torch.no_grad():
            embedding = model.get_input_embeddings().weight
            part = torch.randn(1, config.hidden_size, dtype=dtype)
            embedding += preset.common * config.initializer_range * part
    return Loaded(model, name, encode_bytes, decode_bytes)


PASS_BYTES_PER_ROW = 3 << 19
"""Device memory that a pass of the released widths takes for each row: 1.5 MiB is set aside.

The largest at once are the experts' inputs and results (10 of 2,560 BF16 numbers per row, several times over) and the
FP32 tensors of the torch fallback of linear attention (48 heads of 128, about a dozen).
"""

SPARE_BYTES = 2 << 30
"""Left free for the CUDA context, workspaces of libraries and torch's own rounding."""


def layers_that_fit(preset: Preset, dtype: torch.dtype, place: Place) -> int:
    """As many layers of a preset, in whole periods of four, as free memory holds beside a context and a pass.

    Raises UserError where there is no room for four.
    """
    free = free_bytes(place.device)
    if free is None:
        raise UserError("--layers: wanted a number: this system does not say how much memory is free")
    one, two = (parameters_of(preset, LAYER_PERIOD * count) for count in (1, 2))
    rest, period = (2 * one - two) * dtype.itemsize, (two - one) * dtype.itemsize
    geometry = preset.geometry
    numbers = 2 * geometry["num_key_value_heads"] * geometry["head_dim"] + 2 * geometry["indexer_head_dim"]
    period += place.tokens * numbers * dtype.itemsize
    held = rest + place.chunk * PASS_BYTES_PER_ROW + SPARE_BYTES
    count = LAYER_PERIOD * ((free - held) // period)
    if count < LAYER_PERIOD:
        needed, there = ((size >> 20) / 1024 for size in (held + period, free))
        raise UserError(
            f"--preset: four layers and {place.tokens:,} tokens need about {needed:,.1f} GiB; free are {there:,.1f} GiB"
        )
    return int(min(count, preset.layers))


def parameters_of(preset: Preset, layers: int) -> int:
    """How many numbers a preset of so many layers has; nothing is allocated."""
    transformers = transformers_module()
    config = transformers.Qwen4ExpTextConfig(**preset.fields(layers))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def load_folder(folder: Path, dtype: torch.dtype | None, device: torch.device | None = None) -> Loaded:
    """A model from a local folder, with its own tokenizer, on a device; nothing is fetched. Raises UserError."""
    config_file = folder / "config.json"
    if not folder.is_dir():
        raise UserError(f"--model {folder}: no such folder")
    if not config_file.is_file():
        raise UserError(f"--model {folder}: has no config.json")
    try:
        fields = json.loads(config_file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"--model {folder}: config.json cannot be read: {error}") from error
    found = fields.get("model_type") if isinstance(fields, dict) else None
    if found not in MODEL_TYPES:
        raise UserError(f"--model {folder}: wanted a model of type {' or '.join(MODEL_TYPES)}; got {found!r}")
    transformers = transformers_module()
    _check_config(folder, fields)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype or "auto", local_files_only=True
        ).eval()
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"--model {folder}: Transformers cannot load it: {error}") from error
    if device is not None:
        model = model.to(device)
    return Loaded(model, str(folder), lambda text: list(tokenizer(text)["input_ids"]), tokenizer.decode)


def _check_config(folder: Path, fields: dict[str, Any]) -> None:
    """UserError for a config that has no sparse layers, or others than are known, before any weight is read."""
    from huggingface_hub.errors import StrictDataclassError

    from flashqsa.integrations.transformers import sparse_layer_ids, spec_of_config

    try:
        if "layer_types" in fields.get("text_config", fields):
            sparse_layer_ids(fields)
        config = transformers_module().AutoConfig.from_pretrained(folder, local_files_only=True)
        sparse_layer_ids(config)
        spec_of_config(config)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise UserError(f"--model {folder}: {error}") from error


def encode_bytes(text: str) -> list[int]:
    """A preset's tokens: the bytes of UTF-8."""
    return list(text.encode("utf-8"))


def decode_bytes(tokens: list[int]) -> str:
    """Text of a preset's tokens; special tokens and broken characters show as U+FFFD."""
    parts = [bytes([token]) if token < BYTE_TOKENS else b"\xff" for token in tokens]
    return b"".join(parts).decode("utf-8", errors="replace")
