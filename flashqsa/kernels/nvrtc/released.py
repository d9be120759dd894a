"""The sources that GPUs of every kind may ask NVRTC for, what `flashqsa build` compiles ahead, and who compiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flashqsa.config import TopkConfig
from flashqsa.kernels.nvrtc import everything, worklist, write
from flashqsa.kernels.nvrtc.compiler import Source, cache_folder, is_kept
from flashqsa.kernels.nvrtc.library import NvrtcNotFoundError, nvrtc_for
from flashqsa.kernels.nvrtc.products import products_source
from flashqsa.kernels.nvrtc.topk import variant_for
from flashqsa.values import QsaSpec


def shared_sources(capability: tuple[int, int]) -> tuple[Source, ...]:
    """Sources of selecting everything, of worklists and of writing, which have one variant for every call."""
    worklists = worklist.worklist_kernel(capability, 1, 1).source
    return everything._kernel(capability).source, worklists, write.SOURCE


def made_by(capability: tuple[int, int]) -> str:
    """What a device's kernels are made by here, in words: an NVRTC, or the folder that `flashqsa build` filled.

    A folder counts where it holds the shared sources of this very version, so that what is left to chance is a call of
    another shape than the released model's. Raises NvrtcNotFoundError where there is neither.
    """
    try:
        library, arch = nvrtc_for(capability)
    except NvrtcNotFoundError as error:
        lacks = [source.name for source in shared_sources(capability) if not is_kept(source, capability)]
        if lacks:
            raise NvrtcNotFoundError(f"{error} Nor are {', '.join(lacks)} kept compiled in {cache_folder()}.") from None
        return f"kernels compiled elsewhere, kept in {cache_folder()}"
    return f"NVRTC {library.version[0]}.{library.version[1]} ({library.path}), for {arch}"


def sources(
    spec: QsaSpec, width_blocks: int, ranks: Sequence[TopkConfig], capability: tuple[int, int]
) -> Iterator[Source]:
    """Sources of selecting everything, of the top-k of rows of `width_blocks`, of worklists and of writing.

    From 8.0 on what stands around cuBLAS too, whichever route is taken: a pin may ask for it. Keys are taken to begin
    where 8 of their numbers can be loaded at a time.

    >>> ranks = (TopkConfig((7, 5), threads=256, resident=1024),)
    >>> [source.name for source in sources(QsaSpec(), 46_000, ranks, (7, 5))]
    ['everything.cu', 'worklist.cu', 'write.cu', 'topk.cu']
    """
    yield from shared_sources(capability)
    yield from (variant_for(spec.top_blocks, width_blocks, config).source for config in ranks)
    if capability >= (8, 0):
        yield from (products_source(*kind) for kind in ((False, True), (True, True, False), (True, True, True)))
