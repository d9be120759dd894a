"""The case list: one frozen `Case` describes a call, and `CASES` names those that every kernel set must get right."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashqsa.values import FP8, QsaSpec

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def spec_of(q_heads: int, kv_heads: int, head_dim: int = 64, top_blocks: int = 8) -> QsaSpec:
    """A spec with the released model's indexer (4 heads of 128, blocks of 4 tokens) and small everything else."""
    return QsaSpec(q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, top_blocks=top_blocks)


@dataclass(frozen=True)
class Case:
    """One call, described by host facts; `inputs.build` makes its tensors.

    name             unique
    query_lengths    rows of each request: the last tokens of its context
    context_lengths  tokens of each request
    spec             the layer
    q_dtype          of index_q, q and gate; must be the cache's dtype unless that is FP8
    cache_dtype      of both caches
    page_tokens      tokens per page of the KV cache
    page_blocks      blocks per page of the index cache; 0 for as many as the KV cache's pages hold
    padding          one padding row stands before each of these rows (as counted without padding)
    regime           "scored": the selection comes from the scores; else a regime of `selections.select_locally`
    order            physical page order: "identity", "reversed" or "random" (stale ids where a table has no page)
    layout           of the KV pool: "interleaved", "packed", "apart" or "wide-view" (views of a wider tensor)
    holes            (request, page) entries of both page tables that are -1; both caches' pages must be of one size
    gate             whether the output is gated
    exact_scores     index queries and keys hold small whole numbers, so that FP32 scores are exact and ties are many
    head_scales      FP8 only: one scale per KV head instead of one per tensor
    peak             factor on q: large ones put the softmax's mass on a few tokens
    seed             of every random number
    tags             "smoke" marks the dozen that runs in seconds

    >>> case = Case("pair", (2, 1), (14, 5), spec_of(6, 1), padding=(0,))
    >>> case.rows, case.tokens, str(case)
    (4, 19, 'pair: 4 rows of 2 requests, contexts 5-14, heads 6/1 x 64, k=8, q float32, cache float32, pages of 16')
    """

    name: str
    query_lengths: tuple[int, ...]
    context_lengths: tuple[int, ...]
    spec: QsaSpec
    q_dtype: torch.dtype = FP32
    cache_dtype: torch.dtype = FP32
    page_tokens: int = 16
    page_blocks: int = 0
    padding: tuple[int, ...] = ()
    regime: str = "scored"
    order: str = "random"
    layout: str = "interleaved"
    holes: tuple[tuple[int, int], ...] = ()
    gate: bool = True
    exact_scores: bool = True
    head_scales: bool = False
    peak: float = 4.0
    seed: int = 0
    tags: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of the call, with padding."""
        return sum(self.query_lengths) + len(self.padding)

    @property
    def tokens(self) -> int:
        """Tokens of all requests together."""
        return sum(self.context_lengths)

    @property
    def index_page_blocks(self) -> int:
        """Blocks per page of the index cache."""
        return self.page_blocks or self.page_tokens // self.spec.block_tokens

    def __str__(self) -> str:
        q, cache = (str(dtype).removeprefix("torch.") for dtype in (self.q_dtype, self.cache_dtype))
        low, high = min(self.context_lengths, default=0), max(self.context_lengths, default=0)
        spec = self.spec
        return (
            f"{self.name}: {self.rows} rows of {len(self.query_lengths)} requests, contexts {low}-{high}, "
            f"heads {spec.q_heads}/{spec.kv_heads} x {spec.head_dim}, k={spec.top_blocks}, q {q}, cache {cache}, "
            f"pages of {self.page_tokens}"
        )


SMALL, ONE_HEAD, RANK2, RANK4 = spec_of(24, 2), spec_of(3, 1), spec_of(12, 1), spec_of(6, 1)
MODEL = QsaSpec()
SMOKE = ("smoke",)

CASES: tuple[Case, ...] = (
    # Prefill from nothing: rows below the budget, in the tie zone just above it, and far above it, in one request.
    Case("prefill", (96,), (96,), SMALL, tags=SMOKE),
    Case("prefill-fp16", (96,), (96,), RANK2, FP16, FP16, 64),
    Case("prefill-bf16", (96,), (96,), RANK4, BF16, BF16, 4, layout="packed"),
    Case("prefill-fp8", (96,), (96,), SMALL, BF16, FP8, 16, tags=SMOKE),
    Case("prefill-fp8-head-scales", (70,), (70,), SMALL, FP16, FP8, 64, head_scales=True, layout="apart"),
    Case("prefill-fp8-fp32-queries", (50,), (50,), RANK2, FP32, FP8, 784),
    Case("prefill-no-gate", (65,), (65,), ONE_HEAD, gate=False),
    Case("prefill-head-dim-128", (64,), (80,), spec_of(24, 2, 128), layout="packed"),
    Case("prefill-head-dim-256", (48,), (160,), spec_of(24, 2, 256), BF16, BF16, tags=SMOKE),
    Case("prefill-24-heads-on-1", (40,), (120,), spec_of(24, 1), FP16, FP16, layout="wide-view"),
    Case("prefill-32-heads-on-1", (40,), (120,), spec_of(32, 1), page_tokens=204),
    Case("prefill-1-head-on-1", (40,), (120,), spec_of(1, 1)),
    Case("prefill-odd-k", (60,), (300,), spec_of(6, 1, top_blocks=13)),
    Case("prefill-k-1", (40,), (40,), spec_of(6, 1, top_blocks=1)),
    Case("prefill-normal-scores", (64,), (512,), spec_of(12, 1, top_blocks=16), exact_scores=False),
    Case("prefill-normal-scores-bf16", (64,), (512,), spec_of(12, 1, top_blocks=16), BF16, BF16, exact_scores=False),
    Case("prefill-normal-scores-fp8", (48,), (512,), spec_of(6, 1, top_blocks=16), FP16, FP8, exact_scores=False),
    # Chunked prefill: a chunk whose start cuts a block, and every remainder of the prefix.
    Case("chunk-at-842", (6,), (848,), spec_of(6, 1, top_blocks=64)),
    Case("chunks-at-840-to-843", (6, 7, 5, 1), (846, 848, 847, 844), spec_of(6, 1, top_blocks=64), FP16, FP16),
    Case("chunk-over-long-prefix", (33,), (3000,), spec_of(6, 1, top_blocks=32), page_tokens=64),
    # Page sizes that are no power of two, index pages unlike KV pages, and the placements of pages.
    Case("pages-of-4", (20,), (200,), RANK4, page_tokens=4, order="reversed"),
    Case("pages-of-784", (12, 9), (1800, 900), RANK4, FP16, FP16, 784, order="reversed"),
    Case("pages-of-816", (12,), (1700,), RANK4, page_tokens=816, layout="wide-view"),
    Case("pages-of-1616", (12,), (3400,), RANK4, BF16, BF16, 1616, layout="packed"),
    Case("index-pages-of-64-blocks", (24,), (600,), RANK4, page_tokens=16, page_blocks=64, order="reversed"),
    Case("index-pages-of-3-blocks", (24,), (600,), RANK4, page_tokens=64, page_blocks=3),
    Case("pages-in-order", (24,), (300,), RANK4, order="identity"),
    # Decode.
    Case("decode-1", (1,), (777,), SMALL, tags=SMOKE),
    Case("decode-1-model", (1,), (4099,), MODEL, BF16, BF16, 784, tags=SMOKE),
    Case("decode-16", (1,) * 16, tuple(range(3, 403, 25)), RANK2, FP16, FP16, layout="apart"),
    Case("decode-33", (1,) * 33, tuple(range(1, 331, 10)), ONE_HEAD, padding=(33, 33), tags=SMOKE),
    Case("decode-16-fp8", (1,) * 16, tuple(range(40, 440, 25)), RANK2, BF16, FP8, 64, tags=SMOKE),
    # Verify rows: every number of rows per request, at positions that cross none to three block ends.
    Case(
        "verify-1-to-12", (1, 2, 3, 4, 5, 6, 7, 8, 9, 12), (90, 91, 92, 93, 94, 95, 96, 97, 98, 101), RANK4, FP16, FP16
    ),
    Case("verify-3-of-33", (3,) * 33, tuple(range(40, 172, 4)), ONE_HEAD),
    Case("verify-5", (5, 5), (64, 131), SMALL, BF16, BF16, padding=(0, 5, 10)),
    Case("verify-model", (4, 5), (2300, 2500), MODEL, FP16, FP8, 16, tags=SMOKE),
    # Mixtures, requests without rows, padding.
    Case("prefill-and-decode", (40, 1, 1, 1), (40, 500, 37, 211), SMALL, tags=SMOKE),
    Case("requests-of-3-8-13", (3, 8, 13), (103, 58, 13), RANK4, BF16, BF16),
    Case("requests-without-rows", (0, 4, 0, 1, 0), (50, 60, 3, 70, 1), RANK4, tags=SMOKE),
    Case("request-without-tokens", (0, 4), (0, 60), RANK4),
    Case("no-rows", (0, 0), (50, 60), RANK4),
    Case("no-requests", (), (), RANK4),
    Case("only-padding", (0,), (20,), RANK4, padding=(0, 0, 0)),
    Case("padding-first-middle-last", (9, 8), (109, 64), RANK4, FP16, FP16, padding=(0, 0, 4, 9, 17), tags=SMOKE),
    Case("padding-fp8", (5, 3), (105, 47), RANK4, BF16, FP8, padding=(0, 3, 8)),
    # Little to see.
    Case("contexts-of-1-to-3", (1,) * 32, (1, 2, 3, 3) * 8, ONE_HEAD),
    Case("contexts-of-1-to-3-and-5", (1, 2, 3, 2), (1, 2, 3, 5), ONE_HEAD, FP16, FP16),
    Case("first-tokens-of-a-request", (7,), (7,), RANK4, BF16, BF16),
    # At and around the budget.
    Case("100-tokens-model", (20,), (100,), MODEL, tags=SMOKE),
    Case("1700-tokens-model", (6,), (1700,), MODEL, FP16, FP16, 816),
    Case("budget-reached-model", (9,), (2052,), MODEL, page_tokens=64),
    Case("tie-zone-model", (12,), (2140,), MODEL, page_tokens=784),
    Case("tie-zone", (24,), (540,), spec_of(6, 1, top_blocks=128), page_tokens=64),
    # Holes.
    Case("holes", (30,), (300,), RANK4, holes=((0, 0), (0, 7), (0, 12))),
    Case("hole-under-the-tail", (4, 5), (110, 117), RANK4, FP16, FP16, holes=((0, 6), (1, 7))),
    Case("nothing-but-holes", (3, 2), (40, 40), RANK4, holes=((0, 0), (0, 1), (0, 2))),
    Case("holes-below-budget", (12,), (30,), RANK4, BF16, FP8, holes=((0, 0),)),
    # Given selections: how much neighbours share.
    Case("near", (24,), (900,), spec_of(6, 1, top_blocks=64), FP16, FP16, regime="near"),
    Case("mid", (24,), (1800,), spec_of(6, 1, top_blocks=64), BF16, BF16, regime="mid"),
    Case("far", (24,), (4000,), spec_of(6, 1, top_blocks=64), regime="far"),
    Case("equal", (16, 7), (400, 500), RANK4, regime="equal"),
    Case("disjoint", (17, 5), (2100, 900), spec_of(6, 1, top_blocks=24), FP16, FP16, regime="disjoint", peak=12.0),
    Case("disjoint-model-512", (8,), (16500,), spec_of(3, 1, top_blocks=512), FP16, FP16, regime="disjoint"),
)
"""Every case runs on every kernel set; a case that a set cannot serve is refused there by name."""


def named(name: str) -> Case:
    """The case of that name. Raises KeyError, with the names there are, when there is none.

    >>> named("decode-1").rows
    1
    """
    for case in CASES:
        if case.name == name:
            return case
    raise KeyError(f"no case is called {name!r}; there are {', '.join(case.name for case in CASES)}")
