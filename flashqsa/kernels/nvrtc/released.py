"""The sources that GPUs of every kind may ask NVRTC for: what `flashqsa build` compiles ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flashqsa.config import TopkConfig
from flashqsa.kernels.nvrtc import everything, worklist, write
from flashqsa.kernels.nvrtc.compiler import Source
from flashqsa.kernels.nvrtc.topk import variant_for
from flashqsa.values import QsaSpec


def sources(
    spec: QsaSpec, width_blocks: int, ranks: Sequence[TopkConfig], capability: tuple[int, int]
) -> Iterator[Source]:
    """Sources of selecting everything, of the top-k of rows of `width_blocks`, of worklists and of writing.

    >>> ranks = (TopkConfig((7, 5), threads=256, resident=1024),)
    >>> [source.name for source in sources(QsaSpec(), 46_000, ranks, (7, 5))]
    ['everything.cu', 'worklist.cu', 'write.cu', 'topk.cu']
    """
    yield everything._kernel(capability).source
    yield worklist.worklist_kernel(capability, 1, 1).source
    yield write.SOURCE
    yield from (variant_for(spec.top_blocks, width_blocks, config).source for config in ranks)
