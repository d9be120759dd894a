"""What `flashqsa bench` measures: cases from options, and the ready lists."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import product

import torch

from flashqsa.check import check_spec
from flashqsa.cli.explain import dtype_named
from flashqsa.cli.show import UserError
from flashqsa.testing.selections import REGIMES
from flashqsa.values import FP8, MAX_TOKENS, QsaSpec

KINDS = ("attention", "indexer", "decode", "pipeline")

CONTEXTS = {"near": 24_240, "mid": 7_500, "far": 38_000, "equal": 38_000, "disjoint": 38_000}
"""Tokens of a regime's context where none is given: where its overlap was measured on the real model, or more."""

CHUNK_ROWS = 1_616
"""Rows of the chunk that ends each of CONTEXTS."""

SUITES = ("smoke", "targets", "sweep", "full")

MEASURES = {
    "attention": ("attention",),
    "indexer": ("selection",),
    "decode": ("selection", "attention", "together"),
    "pipeline": ("selection", "attention", "together"),
}
"""What is timed for a kind of case."""


@dataclass(frozen=True)
class BenchCase:
    """One workload, by host facts.

    kind              one of KINDS
    requests          sequences of the call, all of one length
    rows_per_request  rows of each: the last tokens of its context
    context           tokens of each request
    dtype             of the caches; queries and gate have it too, or BF16 beside FP8
    regime            how much neighbouring rows share (`testing.selections`); in a case that scores, of its queries
    every_route       of an indexer: whether each route that can serve it is timed, in turn

    >>> case = BenchCase("decode", 64, 4, 32768, QsaSpec(), torch.bfloat16, "equal")
    >>> case.rows, str(case)
    (256, 'decode 64 x 4 rows sharing, 32,768 tokens, 24/2, bfloat16')
    """

    kind: str
    requests: int
    rows_per_request: int
    context: int
    spec: QsaSpec
    dtype: torch.dtype
    regime: str
    page_tokens: int = 16
    gate: bool = True
    every_route: bool = False

    @property
    def rows(self) -> int:
        """Rows of the call."""
        return self.requests * self.rows_per_request

    @property
    def q_dtype(self) -> torch.dtype:
        """Dtype of queries and gate."""
        return torch.bfloat16 if self.dtype == FP8 else self.dtype

    @property
    def dtype_name(self) -> str:
        """The caches' dtype without `torch.`."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def measures(self) -> tuple[str, ...]:
        """What is timed: of `selection`, `attention` and `together`."""
        return MEASURES[self.kind]

    @property
    def input_bytes(self) -> int:
        """Device memory of the inputs: pools, queries, gate and selection, without page tables."""
        spec, q_size = self.spec, self.q_dtype.itemsize
        tokens = self.requests * self.context
        found = 0
        if "attention" in self.measures:
            heads = 2 if self.gate else 1
            found += tokens * 2 * spec.kv_heads * spec.head_dim * self.dtype.itemsize
            found += self.rows * (spec.q_heads * spec.head_dim * heads * q_size + 4 * (spec.top_blocks + 1))
        if "selection" in self.measures:
            found += tokens // spec.block_tokens * spec.index_dim * self.dtype.itemsize
            found += self.rows * spec.index_heads * spec.index_dim * q_size
        return found

    @property
    def output_bytes(self) -> int:
        """Device memory of a result: the outputs of the rows, or their selection where nothing is attended to."""
        if "attention" in self.measures:
            return self.rows * self.spec.q_heads * self.spec.head_dim * self.q_dtype.itemsize
        return self.rows * (self.spec.top_blocks + 1) * 4

    def __str__(self) -> str:
        spec, shared = self.spec, {"equal": " sharing"}.get(self.regime, "")
        heads = "" if self.kind == "indexer" else f", {spec.q_heads}/{spec.kv_heads}"
        if self.kind == "decode" or self.requests > 1:
            rows = f"{self.requests} x {self.rows_per_request} rows{shared if self.rows_per_request > 1 else ''}"
        else:
            rows = f"{self.rows} rows" + ("" if self.kind == "indexer" else f" {self.regime}")
        return f"{self.kind} {rows}, {self.context:,} tokens{heads}, {self.dtype_name}"


@dataclass(frozen=True)
class Wanted:
    """The options that describe cases, as text; None where an option was not given."""

    rows: str | None = None
    heads: str | None = None
    regime: str | None = None
    dtype: str | None = None
    context: str | None = None
    batch: str | None = None
    rows_per_request: str | None = None
    share: bool | None = None
    gate: bool | None = None
    page_tokens: str | None = None
    head_dim: int | None = None
    top_blocks: int | None = None
    every_route: bool | None = None

    def given(self) -> list[str]:
        """Names of the options that were given."""
        return [field.name for field in fields(self) if getattr(self, field.name) is not None]


_COMMON = {"dtype", "context", "page_tokens", "head_dim", "top_blocks"}
TAKES = {
    "attention": _COMMON | {"rows", "heads", "regime", "gate"},
    "indexer": _COMMON - {"head_dim"} | {"rows", "batch", "every_route"},
    "decode": _COMMON | {"batch", "rows_per_request", "heads", "share", "gate"},
    "pipeline": _COMMON | {"rows", "heads", "regime", "gate"},
}
"""The options that a kind of case takes."""

DEFAULTS = {
    "attention": Wanted("1616,8192", "24/2,12/1,6/1", ",".join(REGIMES), "bf16,fp16,fp8"),
    "indexer": Wanted("64,1616,8192", "24/2", "far", "bf16", "29k,150k,184k,1M", "1"),
    "decode": Wanted(None, "24/2", None, "bf16", "32768,150k", "1,16,64", "1,4,5"),
    "pipeline": Wanted("1616,8192", "24/2", "far", "bf16", "38k,150k"),
}
"""What is measured where an option is not given. Attention takes each regime's own context."""


def whole_numbers(option: str, text: str) -> list[int]:
    """Whole numbers of at least 1, with `k` for 1,000 and `M` for 1,000,000. Raises UserError.

    >>> whole_numbers("--context", "24240,7.5k,1M")
    [24240, 7500, 1000000]
    """
    found = []
    for word in text.split(","):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kM]?)", word.strip())
        number = float(match[1]) * {"": 1, "k": 1_000, "M": 1_000_000}[match[2]] if match else 0.0
        if number < 1 or number != int(number):
            raise UserError(f"{option}: wanted whole numbers such as 1616,7.5k; got {word.strip()!r}")
        found.append(int(number))
    return found


def _heads(text: str) -> list[tuple[int, int]]:
    found = []
    for word in text.split(","):
        match = re.fullmatch(r"(\d+)/(\d+)", word.strip())
        if match is None:
            raise UserError(f"--heads: wanted query heads/KV heads, such as 24/2,12/1; got {word.strip()!r}")
        found.append((int(match[1]), int(match[2])))
    return found


def _regimes(text: str, kind: str) -> list[str]:
    # Independent queries give random selections, not disjoint ones: nothing a scored case could be built from.
    allowed = REGIMES if kind == "attention" else tuple(regime for regime in REGIMES if regime != "disjoint")
    found = [word.strip() for word in text.split(",")]
    for word in found:
        if word not in allowed:
            raise UserError(f"--regime: wanted one of {', '.join(allowed)}; got {word!r}")
    return found


def context_for(regime: str, rows: int, spec: QsaSpec) -> int:
    """A regime's own context; where too few tokens would precede the rows, with as many before them as a chunk has.

    >>> context_for("mid", 1616, QsaSpec()), context_for("mid", 8192, QsaSpec())
    (7500, 14076)
    """
    context = CONTEXTS[regime]
    return context if rows + spec.budget <= context else rows + context - CHUNK_ROWS


def _checked(case: BenchCase) -> BenchCase:
    """The case, or UserError or InputError for what no call could be."""
    check_spec(case.spec)
    if case.rows_per_request > case.context:
        option = "--rows-per-request" if case.kind == "decode" else "--rows"
        raise UserError(f"{option}: wanted at most the {case.context} tokens of a context; got {case.rows_per_request}")
    if case.context > MAX_TOKENS:
        raise UserError(f"--context: wanted at most {MAX_TOKENS} tokens; got {case.context}")
    if case.page_tokens % case.spec.block_tokens:
        raise UserError(f"--page-tokens: wanted multiples of {case.spec.block_tokens}; got {case.page_tokens}")
    return case


def cases_of(kind: str, wanted: Wanted) -> list[BenchCase]:
    """Every combination of what was asked, and of the defaults where nothing was. Raises UserError, InputError."""
    for name in wanted.given():
        if name not in TAKES[kind]:
            raise UserError(f"--{name.replace('_', '-')}: not an option of bench {kind}")
    default = DEFAULTS[kind]

    def text(name: str) -> str:
        return str(getattr(wanted, name) if getattr(wanted, name) is not None else getattr(default, name))

    decode = kind == "decode"
    batches = whole_numbers("--batch", text("batch")) if "batch" in TAKES[kind] else [1]
    option = "rows_per_request" if decode else "rows"
    row_counts = whole_numbers(f"--{option.replace('_', '-')}", text(option))
    regimes = ["far" if wanted.share is False else "equal"] if decode else _regimes(text("regime"), kind)
    own_context = wanted.context is None and kind == "attention"
    contexts = [0] if own_context else whole_numbers("--context", text("context"))
    dtypes = [dtype_named(word.strip(), storage=True) for word in text("dtype").split(",")]
    pages = whole_numbers("--page-tokens", wanted.page_tokens or "16")
    heads = _heads(text("heads"))
    for option_name, number in (("--head-dim", wanted.head_dim), ("--top-blocks", wanted.top_blocks)):
        if number is not None and number < 1:
            raise UserError(f"{option_name}: wanted at least 1; got {number}")
    found = []
    for page, dtype, (q_heads, kv_heads), rows, regime, context, batch in product(
        pages, dtypes, heads, row_counts, regimes, contexts, batches
    ):
        spec = QsaSpec(q_heads, kv_heads, wanted.head_dim or 256, top_blocks=wanted.top_blocks or 512)
        tokens = context or context_for(regime, rows, spec)
        gate = wanted.gate is not False
        every = wanted.every_route is True
        found.append(_checked(BenchCase(kind, batch, rows, tokens, spec, dtype, regime, page, gate, every)))
    return found


def _smoke() -> list[BenchCase]:
    return [
        *cases_of("attention", Wanted("64", "24/2", "near", "bf16", "4k")),
        *cases_of("attention", Wanted("64", "12/1", "far", "fp8", "4k")),
        *cases_of("indexer", Wanted(rows="64", context="8k")),
        *cases_of("indexer", Wanted(rows="64", context="8k", every_route=True)),
        *cases_of("indexer", Wanted(rows="1", context="8k", batch="3", every_route=True)),
        *cases_of("decode", Wanted(batch="3", rows_per_request="1,4", context="4k")),
        *cases_of("pipeline", Wanted(rows="64", context="4k")),
    ]


def _targets() -> list[BenchCase]:
    return [
        *cases_of("attention", Wanted("1616", "24/2", "near,mid,far", "bf16")),
        *cases_of("attention", Wanted("1616", "12/1,6/1", "mid", "bf16")),
        *cases_of("attention", Wanted("8192", "24/2", "mid,far", "bf16")),
        *cases_of("attention", Wanted("1616", "24/2", "far", "fp8")),
        *cases_of("indexer", Wanted(rows="1616", context="184k")),
        *cases_of("decode", Wanted(batch="64", rows_per_request="1,4", context="32768")),
        *cases_of("decode", Wanted(batch="1,16", rows_per_request="1", context="32768")),
    ]


def _sweep() -> list[BenchCase]:
    chunks = DEFAULTS["indexer"]
    return [
        *cases_of("indexer", Wanted(rows=chunks.rows, context=chunks.context, every_route=True)),
        *cases_of("indexer", Wanted(rows="1", context="32768,131072,1M", batch="1,16,64", every_route=True)),
    ]


def _full() -> list[BenchCase]:
    return [case for kind in KINDS for case in cases_of(kind, Wanted())]


_LISTS: dict[str, Callable[[], Sequence[BenchCase]]] = {
    "smoke": _smoke,
    "targets": _targets,
    "sweep": _sweep,
    "full": _full,
}


def asked_cases(kind: str, suite: str | None, wanted: Wanted) -> list[BenchCase]:
    """The cases of a command line: a ready list, or combinations of options. Raises UserError, InputError."""
    if kind not in (*KINDS, "all"):
        raise UserError(f"bench: wanted {', '.join(KINDS)} or all; got {kind!r}")
    if suite is None:
        if kind == "all":
            raise UserError("bench all: wanted --suite with it")
        return cases_of(kind, wanted)
    if suite not in SUITES:
        raise UserError(f"--suite: wanted one of {', '.join(SUITES)}; got {suite!r}")
    if wanted.given():
        raise UserError(f"--{wanted.given()[0].replace('_', '-')}: a suite has its own; leave out one of the two")
    found = [case for case in _LISTS[suite]() if kind in ("all", case.kind)]
    if not found:
        raise UserError(f"--suite {suite}: has no {kind} case")
    return found
