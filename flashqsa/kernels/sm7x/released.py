"""The sources of this folder that a plan may ask NVRTC for: what `flashqsa build` compiles ahead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flashqsa.attend_shape import Sm7xTile
from flashqsa.config import Sm7xScoreConfig, sm7x_resident, sm7x_tiles
from flashqsa.kernels.nvrtc import Source
from flashqsa.kernels.nvrtc.products import products_source
from flashqsa.kernels.sm7x.attend import sm7x_kernel
from flashqsa.kernels.sm7x.merge import merge_kernel
from flashqsa.kernels.sm7x.score import variant_for
from flashqsa.plan import Plan
from flashqsa.values import FP8


def sources(plan: Plan) -> Iterator[Source]:
    """Sources of scores, attention and merge, of caches whose numbers can be loaded 8 at a time."""
    spec, call = plan.call.spec, plan.call
    e4m3 = (call.index_cache_dtype or call.cache_dtype) == FP8
    for chunk in (plan.select.whole, plan.select.last):
        if chunk is not None and isinstance(chunk.score, Sm7xScoreConfig):
            yield variant_for(spec, chunk.score, e4m3, aligned=True).source
            if chunk.score.product_columns:
                yield products_source(e4m3, aligned=True)
                # Rows that cuBLAS leaves over may be few.
                for tile in sm7x_tiles(spec):
                    few = replace(chunk.score, **tile, resident=sm7x_resident(spec, **tile))
                    yield variant_for(spec, few, e4m3, aligned=True).source
    shape = plan.attend.shape
    if shape is not None and isinstance(shape.tile, Sm7xTile):
        yield sm7x_kernel(shape.tile, spec.heads_per_kv_head, call.cache_dtype == FP8).source
        yield merge_kernel(shape.tile.capability, spec.head_dim).source
