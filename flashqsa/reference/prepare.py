"""What a layer does between its projections and its attention, row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from flashqsa.reference.score import rms_norm, rotate
from flashqsa.reference.write import write_index_keys, write_kv
from flashqsa.values import IndexCache, KvCache, QsaSpec, Rows


def prepare(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    index_q: Tensor,
    raw_keys: Tensor,
    kv_cache: KvCache,
    index_cache: IndexCache,
    rows: Rows,
    spec: QsaSpec,
    q_norm: Tensor,
    k_norm: Tensor,
    index_q_norm: Tensor,
    index_k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    first_angles: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Norms (in FP64, rounded once) and rotary (in the numbers' dtype), and the caches written: q and index_q.

    Arguments as of `kernels.nvrtc.prepare`; what the results hold for padding is undefined. Writes in place.
    """
    if index_cache.raw_keys is None:
        raise ValueError("prepare needs an index cache with raw_keys")
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

    write_kv(prepared(keys, k_norm), values, kv_cache, rows)
    write_index_keys(raw_keys, index_cache, rows, spec, index_k_norm, opening[:, 0], opening[:, 1], eps)
    return prepared(q, q_norm), prepared(index_q, index_q_norm)
