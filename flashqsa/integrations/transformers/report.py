"""What a model's sparse layers would take, for a described call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from flashqsa.check import check_pin
from flashqsa.integrations.transformers.layer import FlashQsaAttention
from flashqsa.integrations.transformers.ranks import spec_here
from flashqsa.integrations.transformers.switch import qsa_layers
from flashqsa.integrations.transformers.versions import spec_of_config
from flashqsa.machine import facts_here
from flashqsa.route import Call, Decision, choose_route
from flashqsa.values import MAX_TOKENS, QsaSpec


@dataclass(frozen=True)
class LayerRoute:
    """One sparse layer and the routes it takes; both None where the layer is stock.

    name    of the module in its model
    spec    its shape, with the heads that this process has of it
    device  it runs on
    """

    name: str
    spec: QsaSpec
    device: torch.device
    select: Decision | None
    attend: Decision | None


def spec_of(module: nn.Module) -> QsaSpec:
    """The shape of a sparse layer, stock or ours, with all its heads. Raises UnsupportedModelError as `enable` does."""
    return spec_of_config(module.config)


def route_report(
    model: nn.Module, *, rows: int, max_position: int, requests: int = 1, route: str | None = None
) -> list[LayerRoute]:
    """The routes of a model's sparse layers for a pass of `rows` rows of `requests`, at positions to `max_position`.

    Each layer is asked about the device that it runs on, with the heads that this process has of it.
    `route` pins one, else FLASHQSA_ROUTE does. Nothing runs. Raises NoRouteError; InputError or KnobError for a pin
    that no route has; ValueError for numbers of rows, requests or positions that no pass has.
    """
    _check_whole("rows", rows, 1)
    _check_whole("requests", requests, 1)
    _check_whole("max_position", max_position, 0, MAX_TOKENS - 1)
    pin = check_pin(route)
    found = []
    for name, layer in qsa_layers(model).items():
        spec, weight = spec_here(layer), layer.get_parameter("k_norm.weight")
        device = _device_of(layer, weight)
        select = attend = None
        if isinstance(layer, FlashQsaAttention):
            call = Call(spec, rows, requests, max_position, weight.dtype, weight.dtype)
            facts = facts_here(device)
            select, attend = (choose_route(stage, call, facts, pin) for stage in ("select", "attend"))
        found.append(LayerRoute(name, spec, device, select, attend))
    return found


def _check_whole(name: str, value: object, least: int, most: int | None = None) -> None:
    bound = f"of at least {least}" if most is None else f"from {least} to {most}"
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        raise ValueError(f"{name}: wanted a whole number {bound}; got {value!r}")


def _device_of(layer: nn.Module, weight: torch.Tensor) -> torch.device:
    """Where a layer runs: with its weights, or where accelerate brings weights to that lie elsewhere meanwhile."""
    device = getattr(getattr(layer, "_hf_hook", None), "execution_device", None)
    if device is None:
        return weight.device
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
