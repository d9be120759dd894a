"""What a layer does between its projections and its attention, row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from flashqsa.reference.score import rms_norm, rotate
from flashqsa.reference.write import write_index_keys, write_kv
from flashqsa.values import IndexCache, KvCache, Projected, QsaSpec, Rows


@torch.no_grad()
def prepare(
    projected: Projected, kv_cache: KvCache, index_cache: IndexCache, rows: Rows, spec: QsaSpec
) -> tuple[Tensor, Tensor]:
    """Norms (in FP64, rounded once) and rotary (in the numbers' dtype), and the caches written: q and index_q.

    Arguments as of `kernels.nvrtc.prepare`. What the results hold for padding is undefined. Writes in place.
    """
    if index_cache.raw_keys is None:
        raise ValueError("prepare needs an index cache with raw_keys")
    cos, sin, first_angles, eps = projected.cos, projected.sin, projected.first_angles, projected.eps
    position = torch.where(rows.position <= rows.max_position, rows.position, -1)
    rows = Rows(rows.request, position, rows.max_position)
    blocks = index_cache.raw_keys.shape[1] // spec.block_tokens
    own = cos.new_zeros((rows.count, 2, cos.shape[1]))
    opening = torch.zeros_like(own)
    for row in range(rows.count):
        request, at = int(rows.request[row]), int(rows.position[row])
        if request < 0 or at < 0:
            continue
        block = at // spec.block_tokens
        if first_angles is None:
            first = block * spec.block_tokens
            own[row], opening[row] = torch.stack((cos[at], sin[at])), torch.stack((cos[first], sin[first]))
            continue
        own[row] = torch.stack((cos[row], sin[row]))
        if at % spec.block_tokens == 0:
            first_angles[request, block % blocks] = own[row]
        opening[row] = first_angles[request, block % blocks]
    # One number stands for both dimensions of a pair.
    own, opening = (torch.cat([angles, angles], dim=2) for angles in (own, opening))

    def prepared(heads: Tensor, weight: Tensor) -> Tensor:
        normed = rms_norm(heads.double(), weight.double(), eps).to(heads.dtype)
        return rotate(normed, *own.to(heads.dtype)[:, :, None].unbind(1))

    write_kv(prepared(projected.keys, projected.k_norm), projected.values, kv_cache, rows)
    weight = projected.index_k_norm
    write_index_keys(projected.raw_keys, index_cache, rows, spec, weight, opening[:, 0], opening[:, 1], eps)
    return prepared(projected.q, projected.q_norm), prepared(projected.index_q, projected.index_q_norm)
