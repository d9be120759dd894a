"""The exact selection, by a full sort."""

from __future__ import annotations

import torch

from flashqsa.values import Scores, Selection


def topk(scores: Scores, top_blocks: int) -> Selection:
    """Each row's best blocks: by score descending, then block id ascending; handed on in ascending order.

    Scores are compared in their own dtype; -0.0 equals 0.0. NaN and -inf are never selected, +inf comes first.

    >>> scores = Scores(torch.tensor([[0.5, 2.0, 0.5, float("nan"), 0.5]]), torch.tensor([5], dtype=torch.int32))
    >>> topk(scores, 3).blocks.tolist(), topk(scores, 5).blocks.tolist(), topk(scores, 5).count.tolist()
    ([[0, 1, 2]], [[0, 1, 2, 4, -1]], [4])
    """
    width, device = scores.values.shape[1], scores.values.device
    seen = torch.arange(width, device=device) < scores.visible[:, None]
    values = torch.where(seen & ~scores.values.isnan(), scores.values, float("-inf")) + 0.0
    order = torch.sort(values, dim=1, descending=True, stable=True).indices[:, :top_blocks]
    chosen = values.gather(1, order) > float("-inf")
    ascending = torch.where(chosen, order, width).sort(dim=1).values
    blocks = torch.full((values.shape[0], top_blocks), -1, dtype=torch.int32, device=device)
    blocks[:, : order.shape[1]] = torch.where(ascending < width, ascending, -1)
    return Selection(blocks, chosen.sum(dim=1, dtype=torch.int32))
