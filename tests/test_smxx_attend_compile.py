"""The Triton attention kernel compiled ahead of time, and the launches that host numbers choose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from flashqsa.attend_shape import (
    LIST_PAD,
    STORED,
    HopperTile,
    Layout,
    Split,
    TritonTile,
    attend_refusal,
    attend_shape,
    choose_split,
    hopper_refusal,
    triton_tiles,
    window_rows,
)
from flashqsa.device import KNOWN_DEVICES, DeviceFacts
from flashqsa.values import QsaSpec

ROOT = Path(__file__).resolve().parent.parent
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_120": 99 << 10}
COMPILED = {"sm_80": ("64 fp8",), "sm_90": ("64 bf16", "16 bf16", "32 fp32"), "sm_120": ("64 bf16",)}
GPUS = [facts for facts in KNOWN_DEVICES.values() if facts.capability is not None and facts.capability >= (8, 0)]
H200 = DeviceFacts.named("h200")


@pytest.mark.skipif(find_spec("triton") is None, reason="the kernels of smxx are written in Triton")
@pytest.mark.parametrize("arch", SHARED_BYTES)
def test_the_attention_kernel_compiles(arch: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.smxx_attend_compile", arch]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert set(found) == {f"{arch} {name}" for name in COMPILED[arch]}
    for name, kernel in found.items():
        assert kernel["shared"] <= SHARED_BYTES[arch], name
        assert kernel["registers"] <= 255
        # The end of a unit keeps some registers in local memory, its loop none (docs/kernels/attend.md).
        assert kernel["stack"] <= (0 if " 16 " in name else 128), name
        wanted = ["wgmma.mma_async" if arch == "sm_90" and " 64 " in name else "mma.sync"]
        assert kernel["products"] == ([] if "fp32" in name else wanted), name


@pytest.mark.parametrize("facts", GPUS, ids=lambda facts: facts.name)
@pytest.mark.parametrize("heads", [1, 2, 3, 6, 12, 24, 32])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("cache_bytes", [1, 2, 4])
def test_every_shape_of_heads_has_a_tile(facts: DeviceFacts, heads: int, head_dim: int, cache_bytes: int) -> None:
    spec = QsaSpec(q_heads=heads, kv_heads=1, head_dim=head_dim)
    assert attend_refusal(spec, STORED[cache_bytes], Layout(), facts) is None
    on_hopper = hopper_refusal(spec, torch.float16, STORED[cache_bytes], Layout(), facts) is None
    for rows, requests in ((1, 1), (64, 64), (256, 64), (1616, 1), (65_536, 3)):
        for hopper in {False, on_hopper}:
            shape = attend_shape(spec, rows, requests, 150_000, facts, cache_bytes=cache_bytes, hopper=hopper)
            tile = shape.tile
            assert 1 <= tile.group_rows <= 16
            if isinstance(tile, HopperTile):
                assert facts.capability == (9, 0)
                assert tile.group_rows <= tile.consumers * (64 // heads)
            else:
                assert isinstance(tile, TritonTile)
                assert tile.group_rows * heads <= tile.lines
                assert tile.tokens % spec.block_tokens == 0
                assert tile.words == (cache_bytes == 1)
            split = shape.split(rows, spec)
            assert split.units == -(-rows // tile.group_rows)
            assert split.inside or split.whole == 0


@pytest.mark.parametrize("block_tokens", [1, 2, 4, 8, 32])
def test_a_tile_holds_no_more_entries_than_lists_are_filled_up_to(block_tokens: int) -> None:
    """Past them a list is not written, and the next tile's entries are fetched from there."""
    for head_dim in (16, 64, 256):
        spec = QsaSpec(head_dim=head_dim, block_tokens=block_tokens)
        for facts in GPUS:
            for cache_bytes in STORED:
                for tile in triton_tiles(spec, 1, cache_bytes, facts):
                    assert tile.tokens // block_tokens <= LIST_PAD
                    assert tile.tokens % block_tokens == 0
    assert HopperTile.TOKENS // 4 <= LIST_PAD


def test_a_batch_invariant_row_shares_nothing_and_is_not_cut() -> None:
    shape = attend_shape(QsaSpec(), 1616, 1, 37_999, H200, alone=True, cuts=False)
    assert shape.tile.group_rows == 1
    assert shape.split(1616, QsaSpec()) == Split(3232, 3232)
    one = attend_shape(QsaSpec(), 1, 1, 37_999, H200, alone=True, cuts=False)
    assert (one.tile, one.unit_tiles) == (shape.tile, shape.unit_tiles)


@pytest.mark.parametrize("slots", [1, 132, 264])
@pytest.mark.parametrize("tiles", [1, 2, 33])
def test_cutting_never_costs_more_than_not_cutting(slots: int, tiles: int) -> None:
    for units in (1, 2, 60, 131, 132, 133, 263, 264, 265, 646, 3278, 100_000):
        split = choose_split(units, slots, tiles)
        assert 0 <= split.whole <= units
        assert split.parts <= max(tiles, 1)
        if split.cut:
            waves = split.whole / slots + -(-split.cut * split.parts // slots) / split.parts
            assert waves < -(-units // slots)
        else:
            assert split.programs == units


@pytest.mark.parametrize("together", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 20, 100])
def test_windows_of_a_few_rows_are_even(together: int) -> None:
    rows = window_rows(together, 5)
    assert rows <= 5
    assert together > 20 or -(-together // rows) == -(-together // 5)


def test_verify_rows_have_windows_of_their_own() -> None:
    for rows, window in ((4, 4), (5, 5), (8, 4), (9, 5)):
        shape = attend_shape(QsaSpec(q_heads=24, kv_heads=2), 64 * rows, 64, 32_767, DeviceFacts.named("a100"))
        assert shape.tile.group_rows == window


def test_refusals_say_why() -> None:
    def refusal(spec: QsaSpec, facts: DeviceFacts, layout: Layout | None = None) -> str:
        return str(attend_refusal(spec, torch.float16, layout or Layout(), facts))

    assert "sm_75" in refusal(QsaSpec(), DeviceFacts.named("t4"))
    assert "cpu" in refusal(QsaSpec(), DeviceFacts.named("cpu"))
    assert "got 512" in refusal(QsaSpec(head_dim=512), H200)
    assert "got 6" in refusal(QsaSpec(block_tokens=6), H200)
    assert "32 bits address" in refusal(QsaSpec(), H200, Layout(last_place=1 << 31))
    rough = Layout(alignment_bytes=2)
    assert "multiples of 4 bytes" in str(attend_refusal(QsaSpec(), STORED[1], rough, DeviceFacts.named("a100")))
    assert attend_refusal(QsaSpec(), STORED[1], rough, DeviceFacts.named("l40s")) is None
    assert attend_refusal(QsaSpec(), torch.float16, rough, DeviceFacts.named("a100")) is None
    with pytest.raises(ValueError, match="head_dim"):
        attend_shape(QsaSpec(head_dim=96), 1, 1, 0, H200)


def test_the_tile_of_the_oldest_gpus_converts_fp8_itself() -> None:
    for name, native in (("a100", False), ("rtx3090", False), ("l40s", True), ("h200", True)):
        tile = attend_shape(QsaSpec(), 64, 1, 4000, DeviceFacts.named(name), cache_bytes=1).tile
        assert isinstance(tile, TritonTile)
        assert tile.native_fp8 is native
