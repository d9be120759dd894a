"""Parts of vLLM's Qwen4-Exp that vLLM has for some devices or dtypes alone, in plain torch for the others.

They are which row is whose and the gated residual's element-wise steps, which vLLM has in Triton, and the gated delta
rule, which it has for CPUs in BF16. What is rounded is rounded where Transformers' `Qwen4ExpTextGatedResidual` and
`Qwen4ExpTextGatedDeltaNet` round. vLLM is not needed to import this file.
"""

from __future__ import annotations

import torch
from torch import Tensor


def requests_of_rows(query_start_loc: Tensor, count: int) -> Tensor:
    """The request [count] int32 of each row; the number of requests for rows past the last one.

    query_start_loc  [requests + 1], the first row of each request and the end of the last

    >>> requests_of_rows(torch.tensor([0, 3, 3, 4]), 6)
    tensor([0, 0, 0, 2, 3, 3], dtype=torch.int32)
    """
    index = torch.arange(count, dtype=query_start_loc.dtype, device=query_start_loc.device)
    return torch.searchsorted(query_start_loc[1:], index, right=True, out_int32=True)


def write_rows(query_start_loc: Tensor, seq_lens: Tensor, request: Tensor, position: Tensor) -> None:
    """Writes request and position [rows] int32 of a step's rows as `Rows` has them; -1 and -1 for padding.

    query_start_loc  [requests + 1], as of `requests_of_rows`
    seq_lens         [requests], tokens of each request up to its last row

    Two rows of a request that now has 10 tokens, then one that is padding:

    >>> rows = torch.empty(2, 3, dtype=torch.int32)
    >>> write_rows(torch.tensor([0, 2]), torch.tensor([10]), rows[0], rows[1])
    >>> rows.tolist()
    [[0, 0, -1], [8, 9, -1]]
    """
    count, requests = request.shape[0], seq_lens.shape[0]
    found = requests_of_rows(query_start_loc, count)
    live = found < requests
    at = found.clamp(max=requests - 1).long()
    index = torch.arange(count, dtype=seq_lens.dtype, device=seq_lens.device)
    place = seq_lens[at] - query_start_loc[at + 1].to(seq_lens.dtype) + index
    # A request that is filled up for a graph has rows and no tokens.
    live &= place >= 0
    request.copy_(torch.where(live, found, -1))
    position.copy_(torch.where(live, place, -1))


def grouped_norm(streams: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    """RMS norm of each of `groups` equal parts of [rows, width], times 1 + weight, in FP32 and rounded once.

    weight  [width], or [width / groups] for all parts
    """
    parts = streams.to(torch.float32).reshape(streams.shape[0], groups, -1)
    normed = parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + weight.to(torch.float32).view(-1, parts.shape[-1]))).flatten(1).to(streams.dtype)


def gated_mean(normed: Tensor, gate: Tensor, streams: int) -> Tensor:
    """Mean [rows, width / streams] over the streams of sigmoid(gate) * normed, both [rows, width]."""
    return (torch.sigmoid(gate) * normed).reshape(normed.shape[0], streams, -1).mean(dim=1)


def scaled_silu(down: Tensor, streams: int) -> Tensor:
    """silu(down / streams)."""
    return torch.nn.functional.silu(down / streams)


def inject(streams: Tensor, block_output: Tensor, injection: Tensor | None, count: int) -> Tensor:
    """Each of `count` streams of [rows, width] with a block's output [rows, width / count] added to it.

    injection  [rows, count] before its sigmoid: a stream takes 2 * sigmoid(injection / count) of the output; None for
               all of it
    """
    added = block_output[:, None]
    if injection is not None:
        added = added * (2 * torch.sigmoid(injection / count))[..., None]
    return (streams.reshape(streams.shape[0], count, -1) + added).flatten(1)


DELTA_CHUNK = 64
"""Tokens that `delta_rule` takes at a time: its work per token grows with it, its number of steps shrinks."""


def causal_conv(inputs: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor) -> tuple[Tensor, Tensor]:
    """silu of a depthwise causal convolution of one request's rows, and what the next call needs of them.

    inputs  [rows, width], of any float dtype; the sum is FP32 and rounded to it before the silu
    weight  [width, taps], and bias [width] or None
    before  [width, taps - 1], the rows before the first

    Returns [rows, width] and [width, taps - 1].
    """
    joined = torch.cat([before.to(inputs.dtype), inputs.t()], dim=1)
    numbers = None if bias is None else bias.to(torch.float32)
    groups = weight.shape[0]
    summed = torch.nn.functional.conv1d(
        joined[None].to(torch.float32), weight[:, None].to(torch.float32), numbers, groups=groups
    )
    kept = joined[:, joined.shape[1] - before.shape[1] :]
    return torch.nn.functional.silu(summed[0].t().to(inputs.dtype)), kept


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Log decay and update strength [rows, heads] FP32 of the gated delta rule, of its projections a and b."""
    step = torch.nn.functional.softplus(a.to(torch.float32) + dt_bias.to(torch.float32))
    return -a_log.to(torch.float32).exp() * step, torch.sigmoid(b.to(torch.float32))


def unit(heads: Tensor) -> Tensor:
    """FP32 vectors of length 1 along the last axis."""
    numbers = heads.to(torch.float32)
    return numbers * torch.rsqrt(numbers.pow(2).sum(-1, keepdim=True) + 1e-6)


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over one request's rows: outputs [rows, heads, value_dim] FP32, and the state after them.

    query, key       [rows, heads, key_dim], not normalised
    value            [rows, heads, value_dim]
    decay, strength  [rows, heads] FP32 of `delta_gates`
    state            [heads, key_dim, value_dim] FP32

    Row by row, with q and k of length 1: T = exp(decay) S, u = strength (v - T^T k), S = T + k u^T, and the output is
    S^T q / sqrt(key_dim) (Gated Delta Networks, arXiv:2412.06464). The updates u of a chunk's rows solve one unit lower
    triangular system: u_i + strength_i * sum over j < i of exp(G_i - G_j) <k_i, k_j> u_j = strength_i (v_i - exp(G_i)
    S^T k_i), where S is the state before the chunk and G the decay summed from its first row.
    """
    scale = query.shape[-1] ** -0.5
    q, k = unit(query).transpose(0, 1) * scale, unit(key).transpose(0, 1)
    v = value.to(torch.float32).transpose(0, 1)
    g, beta = decay.t(), strength.t()[..., None]
    outputs = torch.empty_like(v)
    for start in range(0, v.shape[1], DELTA_CHUNK):
        part = slice(start, start + DELTA_CHUNK)
        qs, ks, vs, bs = q[:, part], k[:, part], v[:, part], beta[:, part]
        summed = g[:, part].cumsum(-1)
        gone = summed.exp()[..., None]
        # Above the diagonal the exponent is positive and may overflow: it is masked before it is taken.
        between = (summed[:, :, None] - summed[:, None, :]).tril().exp().tril()
        system = (bs * (ks @ ks.transpose(1, 2)) * between).tril(-1)
        wanted = bs * (vs - gone * (ks @ state))
        updates = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        outputs[:, part] = gone * (qs @ state) + ((qs @ ks.transpose(1, 2)) * between) @ updates
        left = (summed[:, -1:] - summed).exp()[..., None]
        state = summed[:, -1].exp()[:, None, None] * state + (ks * left).transpose(1, 2) @ updates
    return outputs.transpose(0, 1), state
