"""`flashqsa explain`: the route of a described call, on a device that need not be here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from flashqsa.capture import decision_as_json, facts_as_json
from flashqsa.check import InputError, check_pin, check_spec
from flashqsa.cli.show import FAILED, OK, Screen, UserError, mebibytes, write_json
from flashqsa.device import KNOWN_DEVICES, DeviceFacts
from flashqsa.machine import facts_here
from flashqsa.plan import Plan, make_plan
from flashqsa.route import CANDIDATES, Call, Decision, NoRouteError, Stage, choose_route
from flashqsa.values import FP8, MAX_TOKENS, QsaSpec

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": FP8,
}
DTYPE_ALIASES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3fn"}


@dataclass(frozen=True)
class Question:
    """A call in words: what `flashqsa explain` was asked."""

    rows: int
    requests: int
    context: int
    heads: str
    head_dim: int
    dtype: str
    cache_dtype: str | None
    page_tokens: int
    top_blocks: int
    device: str
    route: str | None
    batch_invariant: bool = False


def dtype_named(name: str, *, storage: bool = False) -> torch.dtype:
    """The dtype of a name or its short form; `storage` allows FP8 too. Raises UserError."""
    found = DTYPES.get(DTYPE_ALIASES.get(name, name))
    if found is None or (found == FP8 and not storage):
        allowed = [n for n, d in DTYPES.items() if storage or d != FP8]
        raise UserError(f"dtype: wanted one of {', '.join(allowed)}; got {name!r}")
    return found


def devices_here() -> list[torch.device]:
    """The CPU, then the current CUDA device where there is one."""
    found = [torch.device("cpu")]
    if torch.cuda.is_available():
        found.append(torch.device("cuda", torch.cuda.current_device()))
    return found


def facts_named(name: str) -> DeviceFacts:
    """Facts of a known device, or for `here` of the GPU that torch would use, else of the CPU. Raises UserError."""
    if name == "here":
        return facts_here(devices_here()[-1])
    try:
        return DeviceFacts.named(name)
    except KeyError:
        raise UserError(f"--device: wanted here, {', '.join(KNOWN_DEVICES)}; got {name!r}") from None


def call_of(question: Question) -> Call:
    """The `Call` that a question describes. Raises UserError, InputError."""
    parts = question.heads.split("/")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise UserError(f"--heads: wanted query heads/KV heads, such as 24/2; got {question.heads!r}")
    for option, value, most in (
        ("--rows", question.rows, None),
        ("--requests", question.requests, None),
        ("--context", question.context, MAX_TOKENS),
        ("--page-tokens", question.page_tokens, None),
    ):
        if value < 1 or (most is not None and value > most):
            bound = "at least 1" if most is None else f"1 to {most}"
            raise UserError(f"{option}: wanted {bound}; got {value}")
    spec = check_spec(QsaSpec(int(parts[0]), int(parts[1]), question.head_dim, top_blocks=question.top_blocks))
    if question.page_tokens % spec.block_tokens:
        raise UserError(f"--page-tokens: wanted a multiple of {spec.block_tokens}; got {question.page_tokens}")
    if question.rows > question.requests * question.context:
        most = question.requests * question.context
        raise UserError(f"--rows: wanted at most requests x context = {most}; got {question.rows}")
    q_dtype = dtype_named(question.dtype)
    cache_dtype = q_dtype if question.cache_dtype is None else dtype_named(question.cache_dtype, storage=True)
    if cache_dtype not in (q_dtype, FP8):
        raise UserError(f"--cache-dtype: wanted the queries' dtype or float8_e4m3fn; got {question.cache_dtype!r}")
    return Call(
        spec,
        question.rows,
        question.requests,
        question.context - 1,
        q_dtype,
        cache_dtype,
        batch_invariant=question.batch_invariant,
    )


def decision_rows(stage: str, decision: Decision) -> list[tuple[str, str, str]]:
    """Stage, route and reason: one line per candidate, the chosen one in its place."""
    found = [(stage, str(refusal.route), f"no: {refusal.reason}") for refusal in decision.refused]
    found.append((stage, str(decision.route), "taken"))
    found += [(stage, str(route), f"not needed: {decision.route} comes first") for route in decision.unused]
    return found


def explain(question: Question, screen: Screen, json_target: str | None) -> int:
    """Shows the decision of each stage. The exit code is FAILED where a stage has no route."""
    call, facts, pin = call_of(question), facts_named(question.device), _pin(question.route)
    rows: list[tuple[str, str, str]] = []
    content: dict[str, Any] = {
        "device": facts_as_json(facts),
        "call": {
            "rows": call.rows,
            "requests": call.requests,
            "max_position": call.max_position,
            "selects_everything": call.selects_everything,
            "q_dtype": str(call.q_dtype).removeprefix("torch."),
            "cache_dtype": str(call.cache_dtype).removeprefix("torch."),
            "page_tokens": question.page_tokens,
            "top_blocks": call.spec.top_blocks,
            "batch_invariant": call.batch_invariant,
        },
        "pin": pin,
        "routes": {},
        "plan": None,
    }
    served, sized = True, True
    for stage in CANDIDATES:
        try:
            decision = choose_route(stage, call, facts, pin)
        except NoRouteError as error:
            served = False
            rows += [(stage, str(refusal.route), f"no: {refusal.reason}") for refusal in error.refused]
            refused = [{"route": str(r.route), "reason": r.reason} for r in error.refused]
            content["routes"][stage] = {"route": None, "refused": refused, "unused": []}
        else:
            rows += decision_rows(stage, decision)
            sized = sized and decision.route.kernel_set != "reference"
            content["routes"][stage] = decision_as_json(decision)
    where = f"{facts.name} ({facts.arch})"
    screen.table(
        f"{call.rows:,} rows of {call.requests:,} requests, context {question.context:,}, on {where}",
        ("stage", "route", "why"),
        rows,
    )
    if served and sized:
        plan = make_plan(call, facts, pin)
        content["plan"] = _plan_json(plan)
        _show_plan(plan, screen)
    if not served:
        screen.line(f"No route serves this call on {where}.")
    write_json(json_target, content)
    return OK if served else FAILED


def stage_decision(stage: Stage, call: Call, facts: DeviceFacts, pin: str | None = None) -> Decision | NoRouteError:
    """The decision, or the error that holds every reason."""
    try:
        return choose_route(stage, call, facts, pin)
    except NoRouteError as error:
        return error


def _pin(route: str | None) -> str | None:
    try:
        return check_pin(route)
    except InputError as error:
        raise UserError(f"--{error}") from error


def _group_rows(plan: Plan) -> tuple[tuple[int, ...], int]:
    """Rows of a group, of which one is taken, and tokens of a tile."""
    shape = plan.attend.shape
    if shape is None:
        return plan.attend.config.group_rows, plan.attend.config.tile_tokens
    return (shape.tile.group_rows,), shape.tile.tokens


def _plan_json(plan: Plan) -> dict[str, Any]:
    groups, tile_tokens = _group_rows(plan)
    content: dict[str, Any] = {
        "chunk_rows": plan.select.chunk_rows,
        "width_blocks": plan.select.width_blocks,
        "group_rows": list(groups),
        "tile_tokens": tile_tokens,
        "max_entries": plan.attend.max_entries,
        "fewest_product_rows": plan.select.fewest_product_rows,
        "workspace_bytes": plan.workspace_bytes,
    }
    if plan.attend.shape is not None:
        content["split"] = asdict(plan.attend.shape.split(plan.call.rows, plan.call.spec))
        content["tile"] = asdict(plan.attend.shape.tile)
    return content


def _product_sizes(plan: Plan) -> list[tuple[str, str]]:
    """From how many rows on cuBLAS scores a request, where it does."""
    fewest = plan.select.fewest_product_rows
    return [] if fewest is None else [("rows of a request that cuBLAS scores, from", f"{fewest:,}")]


def _fused_sizes(plan: Plan) -> list[tuple[str, str]]:
    """Which form the mode `fused` takes."""
    return [] if plan.select.fused is None else [("selection", plan.select.fused.words)]


def _workspaces(plan: Plan) -> list[tuple[str, str]]:
    """Memory of each stage: they do not run at once."""
    stages = (("select", plan.select.workspace_bytes), ("attend", plan.attend.workspace_bytes))
    return [(f"workspace, {stage}", mebibytes(taken)) for stage, taken in stages]


def _show_plan(plan: Plan, screen: Screen) -> None:
    groups, tile_tokens = _group_rows(plan)
    sizes = [
        ("blocks a row sees, at most", f"{plan.select.width_blocks:,}"),
        ("rows scored at a time", f"{min(plan.select.chunk_rows, max(plan.call.rows, 1)):,}"),
        *_product_sizes(plan),
        *_fused_sizes(plan),
        ("rows of a group" + (", one of" if len(groups) > 1 else ""), ", ".join(map(str, groups))),
        ("tokens gathered at a time, at most", f"{tile_tokens:,}"),
        ("blocks a group can have, at most", f"{plan.attend.max_entries:,}"),
    ]
    if plan.attend.shape is not None:
        split = plan.attend.shape.split(plan.call.rows, plan.call.spec)
        cut = f", {split.cut:,} of them in {split.parts} parts" if split.cut else ""
        sizes.append(("groups times KV heads", f"{split.units:,}{cut}"))
    screen.table("plan", ("size", "value"), [*sizes, *_workspaces(plan)])
