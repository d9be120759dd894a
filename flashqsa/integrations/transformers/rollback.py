"""Linear-attention layers in a pass whose last rows may be taken back: what they held after each row is kept.

Keys and values of a token that is taken back are overwritten; a recurrent state cannot be undone. So such a pass runs
these layers, and the n-gram embeddings that keep a context, row by row through their own one-token forward, and keeps
their states after each row. Their results are therefore those of one step per token, bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextGatedDeltaNet, Qwen4ExpTextPLELayer


def linear_layers(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that keep a state per request, in order."""
    kinds = (Qwen4ExpTextGatedDeltaNet, Qwen4ExpTextPLELayer)
    return [module for module in model.modules() if isinstance(module, kinds)]


class LinearStates:
    """The states that a cache's linear-attention layers held after each row of the last pass.

    states   the tensors of the cache [batch, ...] that these layers write in place
    kept     [rows - 1, batch, ...] for each of them, what it held after each row but the last
    """

    def __init__(self, model: nn.Module, cache: Any, rows: int) -> None:
        self.modules = linear_layers(model)
        self.states: list[Tensor] = []
        self._of: list[range] = []
        for module in self.modules:
            found = _states(module, cache.layers[int(module.layer_idx)])  # type: ignore[arg-type]
            self._of.append(range(len(self.states), len(self.states) + len(found)))
            self.states += found
        self.kept = [state.new_empty((rows - 1, *state.shape)) for state in self.states]

    @contextlib.contextmanager
    def followed(self, rows: int) -> Iterator[None]:
        """Runs the modules row by row inside the `with` block, in passes of `rows` rows."""
        before = [vars(module).get("forward") for module in self.modules]
        try:
            for module, own in zip(self.modules, self._of, strict=True):
                module.__dict__["forward"] = self._row_by_row(module.forward, own, rows)
            yield
        finally:
            for module, was in zip(self.modules, before, strict=True):
                module.__dict__.pop("forward", None)
                if was is not None:
                    # accelerate's hooks stand on the instance.
                    module.__dict__["forward"] = was

    def _row_by_row(self, forward: Callable[..., Tensor], own: range, rows: int) -> Callable[..., Tensor]:
        def run(*arguments: Any, **options: Any) -> Tensor:
            parts = []
            for row in range(rows):
                parts.append(forward(*(_row_of(value, row) for value in arguments), **options))
                if row < rows - 1:
                    for number in own:
                        self.kept[number][row].copy_(self.states[number])
            return torch.cat(parts, dim=1)

        return run

    def restore(self, count: Tensor, rows: int) -> None:
        """Puts back what each request's states were after its first `count` [batch] of `rows` rows, in place."""
        request = torch.arange(count.shape[0], device=count.device)
        for state, kept in zip(self.states, self.kept, strict=True):
            chosen = kept[(count - 1).clamp(max=rows - 2), request]
            whole = (count == rows).view(-1, *(1,) * (state.ndim - 1))
            state.copy_(torch.where(whole, state, chosen))


def _row_of(value: Any, row: int) -> Any:
    """One row of a tensor [batch, rows, ...]; anything else as it is."""
    return value[:, row : row + 1] if isinstance(value, Tensor) else value


def _states(module: nn.Module, layer: Any) -> list[Tensor]:
    """What a module writes of its cache layer; all of it is there once a prompt went through."""
    if isinstance(module, Qwen4ExpTextPLELayer):
        # The convolution of the n-gram features, and the last tokens: an n-gram embedding shares its layer's cache.
        return [layer.conv_states[1], layer.conv_states[2]]
    return [layer.conv_states[0], layer.recurrent_states[0]]
