"""Saves one call, with its tensors, its route and its surroundings, and loads it back.

A capture is a folder of two files that can be read without this package and never run code:

    tensors.safetensors   the call's tensors, each in its own dtype
    call.json             function, spec, rows, routes with every refusal, plan, versions, device facts, and for each
                          tensor its dtype, its shape and the strides it had in the call

What is kept is what the call can read. Of a cache these are the pages that its rows reach, renumbered from 0 (their
ids in the call are the tensor `<cache>.page_ids`); page-table entries that no row reaches come back as -1. Every tensor
is stored contiguous, so a loaded one is equal in value, bit by bit, and may differ in strides.

FLASHQSA_CAPTURE names a folder for the first call of each public function of a process; `recording` does the same for
a part of a program, and `listening` hands every call to a function.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import platform
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from flashqsa import __version__, knobs
from flashqsa.device import DeviceFacts
from flashqsa.machine import facts_here
from flashqsa.plan import Plan
from flashqsa.route import Decision, NoRouteError
from flashqsa.values import IndexCache, KvCache, QsaSpec, Rows, Run, Selection

FORMAT = "flashqsa-capture"
FORMAT_VERSION = 1
TENSORS_FILE = "tensors.safetensors"
CALL_FILE = "call.json"
FUNCTIONS = {
    "select_blocks": ("index_q", "index_cache"),
    "sparse_attention": ("q", "gate", "kv_cache", "selection"),
}
"""The functions a capture can hold, with their arguments beside `spec`, `rows` and `plan`."""

MAX_NAMES = 1000
"""Captures of one function that a folder may hold: `select_blocks`, `select_blocks-2`, and so on."""

_SCALES = ("k_scale", "v_scale")

Value = Tensor | IndexCache | KvCache | Selection | None


class CaptureError(RuntimeError):
    """A capture that cannot be written, or a folder that holds none: which one, and why."""


@dataclass(frozen=True)
class Captured:
    """One call, as `load` gives it back.

    function  `select_blocks` or `sparse_attention`
    values    the call's arguments by name: tensors, caches, a selection, or None
    recorded  everything in call.json: versions, device, call, routes, plan, tensors

    >>> call = load("captures/sparse_attention")                                # doctest: +SKIP
    >>> call.function, call.route, sorted(call.values)                          # doctest: +SKIP
    ('sparse_attention', 'cpu:grouped', ['gate', 'kv_cache', 'q', 'selection'])
    """

    function: str
    spec: QsaSpec
    rows: Rows
    values: Mapping[str, Value]
    recorded: Mapping[str, Any]

    @property
    def stage(self) -> str:
        """The stage of `flashqsa.route` that decided the call."""
        return "select" if self.function == "select_blocks" else "attend"

    @property
    def route(self) -> str:
        """The route that the captured call took."""
        return str(self.recorded["routes"][self.stage]["route"])

    def tensor(self, name: str) -> Tensor:
        """An argument that is a tensor; CaptureError when the call has none of that name."""
        value = self.values.get(name)
        if not isinstance(value, Tensor):
            raise CaptureError(f"{self.function} was captured without a tensor {name}")
        return value


@dataclass(frozen=True)
class Noted:
    """One call of a public function, as `note` was told of it, before any of its work."""

    function: str
    spec: QsaSpec
    rows: Rows
    plan: Plan
    values: Mapping[str, Value]


Listener = Callable[[Noted], None]


class _FirstCalls:
    """A listener that saves the first call of each function under a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: set[str] = set()
        self.lock = threading.Lock()

    def __call__(self, noted: Noted) -> None:
        with self.lock:
            fresh = noted.function not in self.seen
            self.seen.add(noted.function)
        if fresh:
            _save_under(self.folder, noted)


_by_knob: dict[str, _FirstCalls] = {}
_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("flashqsa_listeners", default=())


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tells `listener` of every call inside the `with` block: its arguments and its plan, and so the routes it takes.

    Tensors are handed over as they are, not copied: a listener that keeps one keeps its memory.
    """
    token = _listeners.set((*_listeners.get(), listener))
    try:
        yield
    finally:
        _listeners.reset(token)


@contextlib.contextmanager
def recording(folder: Path | str) -> Iterator[None]:
    """Saves the first call of each public function inside the `with` block, whatever FLASHQSA_CAPTURE says."""
    with listening(_FirstCalls(Path(folder))):
        yield


def note(function: str, spec: QsaSpec, rows: Rows, plan: Plan, **values: Value) -> None:
    """Called at the start of every public call; saves or tells it where that was asked for, else returns at once.

    FLASHQSA_CAPTURE's captures go to `<folder>/<function>`, or to `<function>-2` and so on where an earlier process
    left one. Raises CaptureError when the folder cannot be written.
    """
    folder, listeners = knobs.CAPTURE.read(), _listeners.get()
    if not folder and not listeners:
        return
    noted = Noted(function, spec, rows, plan, values)
    # A CUDA graph being captured cannot be read from: the call that warmed it up was.
    if folder and not (rows.request.is_cuda and torch.cuda.is_current_stream_capturing()):
        _by_knob.setdefault(folder, _FirstCalls(Path(folder)))(noted)
    for listener in listeners:
        listener(noted)


def save(folder: Path | str, noted: Noted) -> Path:
    """Writes one call to a folder that must not exist yet (or be empty), and returns its path.

    The folder appears whole or not at all: its files are written beside it and renamed. Raises CaptureError.
    """
    target = Path(folder)
    if noted.function not in FUNCTIONS:
        raise CaptureError(f"{target}: wanted one of {', '.join(FUNCTIONS)}; got {noted.function!r}")
    staging = target.parent / f".{target.name}.{secrets.token_hex(8)}"
    try:
        staging.mkdir(parents=True)
    except OSError as error:
        raise CaptureError(f"{target}: cannot be written: {error}") from error
    try:
        _write(staging, noted)
        # A rename onto a folder that holds anything fails, so two writers cannot both win.
        staging.rename(target)
    except OSError as error:
        reason = "it exists already" if target.exists() else str(error)
        raise CaptureError(f"{target}: cannot be written: {reason}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def load(folder: Path | str, device: torch.device | str = "cpu") -> Captured:
    """Reads a capture onto a device. Executes nothing that the folder holds.

    Raises CaptureError for a folder that is missing, foreign, damaged, or of another format version.
    """
    source = Path(folder)
    recorded = _read_json(source)
    tensors = _read_tensors(source, recorded, torch.device(device))
    try:
        spec = QsaSpec(**recorded["spec"])
        runs = _unpack_runs(recorded["rows"].get("runs"))
        rows = Rows(tensors["rows.request"], tensors["rows.position"], int(recorded["rows"]["max_position"]), runs)
        function = str(recorded["function"])
        values = {name: _unpack(name, recorded["values"][name], tensors) for name in FUNCTIONS[function]}
        captured = Captured(function, spec, rows, values, recorded)
        recorded["routes"][captured.stage]["route"]
    except (KeyError, TypeError, ValueError) as error:
        raise CaptureError(f"{source}: {CALL_FILE} lacks or garbles a field: {error!r}") from error
    return captured


def decision_as_json(decision: Decision) -> dict[str, Any]:
    """A route decision as plain JSON values: the route, the refusals before it, and the candidates after it."""
    return {
        "route": str(decision.route),
        "refused": [{"route": str(r.route), "reason": r.reason} for r in decision.refused],
        "unused": [str(route) for route in decision.unused],
    }


def _choice_as_json(choice: Decision | NoRouteError) -> dict[str, Any]:
    """A decision as JSON; the reasons where a stage that the call does not take has no route."""
    if isinstance(choice, NoRouteError):
        refused = [{"route": str(r.route), "reason": r.reason} for r in choice.refused]
        return {"route": None, "refused": refused, "unused": []}
    return decision_as_json(choice)


def facts_as_json(facts: DeviceFacts) -> dict[str, Any]:
    """Device facts as plain JSON values."""
    fields = dataclasses.asdict(facts)
    fields["kernel_sets"] = sorted(facts.kernel_sets)
    fields["capability"] = None if facts.capability is None else list(facts.capability)
    return {**fields, "arch": facts.arch}


def _save_under(folder: Path, noted: Noted) -> Path:
    for number in range(1, MAX_NAMES + 1):
        target = folder / (noted.function if number == 1 else f"{noted.function}-{number}")
        if target.exists():
            continue
        try:
            return save(target, noted)
        except CaptureError:
            # Another process with the same folder may have taken the name meanwhile.
            if not target.exists():
                raise
    raise CaptureError(f"{folder}: holds {MAX_NAMES} captures of {noted.function} already")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _write(staging: Path, noted: Noted) -> None:
    spec, rows, plan = noted.spec, noted.rows, noted.plan
    packed = _Packed()
    packed.add("rows.request", rows.request)
    packed.add("rows.position", rows.position)
    described = {name: packed.value(name, noted.values.get(name), rows, spec) for name in FUNCTIONS[noted.function]}
    # clone: no two stored tensors may share memory, and keys and values of a pool do.
    stored = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in packed.tensors.items()}
    save_file(stored, staging / TENSORS_FILE)
    call = plan.call
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "function": noted.function,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"flashqsa": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "device": facts_as_json(facts_here(rows.request.device)),
        "spec": dataclasses.asdict(spec),
        "rows": {"count": rows.count, "max_position": rows.max_position, "runs": rows.runs},
        "call": {
            "rows": call.rows,
            "requests": call.requests,
            "max_position": call.max_position,
            "q_dtype": _dtype_name(call.q_dtype),
            "cache_dtype": _dtype_name(call.cache_dtype),
        },
        "routes": {
            "select": _choice_as_json(plan.select_choice),
            "attend": _choice_as_json(plan.attend_choice),
        },
        "plan": {"select": dataclasses.asdict(plan.select), "attend": dataclasses.asdict(plan.attend)},
        "values": described,
        "tensors": {
            name: {"dtype": _dtype_name(tensor.dtype), "shape": list(tensor.shape), "strides": packed.strides[name]}
            for name, tensor in stored.items()
        },
        "sha256": _digest(staging / TENSORS_FILE),
    }
    text = json.dumps(content, indent=1, allow_nan=False)
    (staging / CALL_FILE).write_text(text + "\n", encoding="utf-8")


class _Packed:
    """The tensors to store, by name, and the strides they had in the call."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.strides: dict[str, list[int]] = {}

    def add(self, name: str, tensor: Tensor, strides: Sequence[int] | None = None) -> None:
        self.tensors[name] = tensor
        self.strides[name] = list(tensor.stride() if strides is None else strides)

    def value(self, name: str, value: Value, rows: Rows, spec: QsaSpec) -> dict[str, Any]:
        """Adds an argument's tensors and returns what call.json says of it."""
        if value is None:
            return {"kind": "none"}
        if isinstance(value, Tensor):
            self.add(name, value)
            return {"kind": "tensor"}
        if isinstance(value, Selection):
            self.add(f"{name}.blocks", value.blocks)
            self.add(f"{name}.count", value.count)
            return {"kind": "selection"}
        if isinstance(value, KvCache):
            reach = _pages_reached(rows, value.requests, 1, value.page_tokens)
            self.pages(name, value.page_table, reach, {"keys": value.keys, "values": value.values})
            scales = {field: self.scale(f"{name}.{field}", getattr(value, field)) for field in _SCALES}
            return {"kind": "kv_cache", "pages": value.keys.shape[0], **scales}
        reach = _pages_reached(rows, value.requests, spec.block_tokens, value.page_blocks)
        self.pages(name, value.page_table, reach, {"keys": value.keys})
        if value.raw_keys is not None:
            self.add(f"{name}.raw_keys", value.raw_keys)
        return {"kind": "index_cache", "pages": value.keys.shape[0], "scale": value.scale}

    def pages(self, name: str, table: Tensor, reach: Tensor, pools: Mapping[str, Tensor]) -> None:
        """Adds the pages behind the reached entries, ascending by id, and the table renumbered to them."""
        column = torch.arange(table.shape[1], device=table.device)
        needed = (column < reach[:, None]) & (table >= 0)
        page_ids = torch.unique(table[needed])
        for field, pool in pools.items():
            if page_ids.numel() and int(page_ids[-1]) >= pool.shape[0]:
                wanted = f"{name}.page_table names page {int(page_ids[-1])} of {pool.shape[0]}"
                raise CaptureError(f"{wanted}: the call is not saved")
            # Indexing FP8 is not implemented on every device; its bytes can be indexed anywhere.
            units = pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool
            self.add(f"{name}.{field}", units[page_ids.long()].view(pool.dtype), pool.stride())
        renumbered = torch.searchsorted(page_ids, table.clamp_min(0).contiguous()).to(torch.int32)
        self.add(f"{name}.page_table", torch.where(needed, renumbered, -1), table.stride())
        self.add(f"{name}.page_ids", page_ids)

    def scale(self, name: str, scale: float | Tensor | None) -> float | str | None:
        """A scale as JSON: a number, none, or the name of its tensor."""
        if not isinstance(scale, Tensor):
            return scale
        self.add(name, scale)
        return name


def _pages_reached(rows: Rows, requests: int, unit_tokens: int, page_units: int) -> Tensor:
    """[requests] int64: leading page-table entries that some row of each request reads."""
    reached = torch.zeros(requests, dtype=torch.int64, device=rows.request.device)
    live = rows.live
    units = torch.div(rows.position[live].long() + 1, unit_tokens, rounding_mode="floor")
    reached.scatter_reduce_(0, rows.request[live].long(), units, "amax")
    return torch.div(reached + page_units - 1, page_units, rounding_mode="floor")


def _read_json(source: Path) -> dict[str, Any]:
    try:
        recorded = json.loads((source / CALL_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CaptureError(f"{source}: holds no capture ({CALL_FILE} is missing)") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CaptureError(f"{source}: {CALL_FILE} cannot be read: {error}") from error
    if not isinstance(recorded, dict) or recorded.get("format") != FORMAT:
        raise CaptureError(f"{source}: {CALL_FILE} is not one of {FORMAT}")
    if recorded.get("format_version") != FORMAT_VERSION:
        found = recorded.get("format_version")
        raise CaptureError(f"{source}: wanted format version {FORMAT_VERSION}; got {found!r}")
    if recorded.get("function") not in FUNCTIONS:
        raise CaptureError(f"{source}: wanted one of {', '.join(FUNCTIONS)}; got {recorded.get('function')!r}")
    return recorded


def _read_tensors(source: Path, recorded: dict[str, Any], device: torch.device) -> dict[str, Tensor]:
    path = source / TENSORS_FILE
    try:
        if _digest(path) != recorded.get("sha256"):
            raise CaptureError(f"{source}: {TENSORS_FILE} is not the file that {CALL_FILE} was written with")
        tensors: dict[str, Tensor] = load_file(path, device=str(device))
    except FileNotFoundError as error:
        raise CaptureError(f"{source}: {TENSORS_FILE} is missing") from error
    except (OSError, SafetensorError) as error:
        raise CaptureError(f"{source}: {TENSORS_FILE} cannot be read: {error}") from error
    listed = recorded.get("tensors")
    found = {name: (_dtype_name(tensor.dtype), list(tensor.shape)) for name, tensor in tensors.items()}
    if not isinstance(listed, dict) or found != {
        name: (entry.get("dtype"), entry.get("shape")) for name, entry in listed.items() if isinstance(entry, dict)
    }:
        raise CaptureError(f"{source}: the tensors in {TENSORS_FILE} are not those that {CALL_FILE} lists")
    return tensors


def _unpack(name: str, entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Value:
    kind = entry["kind"]
    if kind == "none":
        return None
    if kind == "tensor":
        return tensors[name]
    if kind == "selection":
        return Selection(tensors[f"{name}.blocks"], tensors[f"{name}.count"])
    keys, table = tensors[f"{name}.keys"], tensors[f"{name}.page_table"]
    if kind == "kv_cache":
        scales = [_unpack_scale(entry[field], tensors) for field in _SCALES]
        return KvCache(keys, tensors[f"{name}.values"], table, *scales)
    if kind == "index_cache":
        scale = entry["scale"]
        return IndexCache(keys, table, None if scale is None else _number(scale), tensors.get(f"{name}.raw_keys"))
    raise ValueError(f"{name} is of kind {kind!r}")


def _unpack_runs(runs: Any) -> tuple[Run, ...] | None:
    return None if runs is None else tuple(Run(*map(int, run)) for run in runs)


def _unpack_scale(scale: Any, tensors: Mapping[str, Tensor]) -> float | Tensor | None:
    if scale is None:
        return None
    return tensors[scale] if isinstance(scale, str) else _number(scale)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"wanted a finite number; got {value!r}")
    return float(value)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


__all__ = [
    "CALL_FILE",
    "FORMAT_VERSION",
    "FUNCTIONS",
    "TENSORS_FILE",
    "CaptureError",
    "Captured",
    "Noted",
    "decision_as_json",
    "facts_as_json",
    "listening",
    "load",
    "note",
    "recording",
    "save",
]
