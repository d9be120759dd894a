"""`flashqsa serve`: the OpenAI-compatible server of Transformers, with FlashQSA in place of the stock sparse layer."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import typer

from flashqsa import knobs
from flashqsa.check import check_device, check_pin
from flashqsa.cli import process
from flashqsa.cli.engine import integration
from flashqsa.cli.preset_folder import write_preset
from flashqsa.cli.presets import PRESETS, transformers_module
from flashqsa.cli.show import OK, Screen, UserError, log_lines
from flashqsa.support import device_supported

SERVER_PACKAGES = ("fastapi", "uvicorn", "pydantic", "openai", "accelerate")
"""What Transformers' server imports, beside Transformers itself: its extra `serving`."""

DTYPES = ("auto", "float32", "bfloat16", "float16")
"""Of weights, as the server names them: those that the model's experts multiply."""


@dataclass(frozen=True)
class Serving:
    """What `flashqsa serve` was asked.

    model   a folder, a name on Hugging Face's hub (with `@revision`), or a preset
    stock   leave the stock sparse layers in place: what FlashQSA is compared with
    passed  further options, as `transformers serve` takes them

    The other fields are None where Transformers' own default holds.
    """

    model: str
    host: str | None = None
    port: int | None = None
    device: str | None = None
    dtype: str | None = None
    seed: int = 0
    threads: int | None = None
    route: str | None = None
    verbose: bool = False
    stock: bool = False
    passed: tuple[str, ...] = ()

    def options(self) -> list[str]:
        """The options of `transformers serve`."""
        named = {"--host": self.host, "--port": self.port, "--device": self.device, "--dtype": self.dtype}
        given = [word for name, value in named.items() if value is not None for word in (name, str(value))]
        return [*given, *self.passed]


def serve(serving: Serving, screen: Screen) -> int:
    """Serves until it is told to end (control-C, or the signal to terminate). Raises UserError, InputError."""
    check_pin(serving.route)
    if serving.model.startswith("-"):
        raise UserError(f"MODEL: wanted before the options that the server takes; got {serving.model}")
    if serving.threads is not None and serving.threads < 1:
        raise UserError(f"--threads: wanted at least 1; got {serving.threads}")
    if serving.stock and serving.route is not None:
        raise UserError("--stock and --route: wanted one of them; got both")
    transformers_module()
    plug = integration()
    command = server_command()
    context = _understood(command, [serving.model, *serving.options()])
    check_place(context.params, stock=serving.stock)
    if serving.threads is not None:
        torch.set_num_threads(serving.threads)
    process.keep_freed_memory()
    with contextlib.ExitStack() as stack:
        stack.enter_context(log_lines(screen, verbose=serving.verbose))
        stack.enter_context(contextlib.suppress(KeyboardInterrupt))
        stack.enter_context(process.interrupted_by_signals())
        if serving.route is not None:
            stack.enter_context(knobs.ROUTE.set_to(serving.route))
        name = stack.enter_context(_model_on_disk(serving))
        context.params["force_model"] = name
        if not serving.stock:
            check_servable(name, plug)
            plug.enable_globally()
            stack.callback(plug.disable_globally)
        _make_hub_folder()
        through = "with its stock layers" if serving.stock else "through FlashQSA"
        screen.line(f"serving {serving.model} {through}; in requests the model is {name}, or left out")
        try:
            command.invoke(context)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise UserError(f"Transformers cannot serve {serving.model}: {error}") from error
    return OK


def server_command() -> Any:
    """`transformers serve` as a command of typer. Raises UserError where it, or a package that it needs, is missing."""
    missing = [name for name in SERVER_PACKAGES if find_spec(name) is None]
    if missing:
        wanted = "pip install 'flashqsa[serve]'"
        raise UserError(f"serving needs the packages of Transformers' server ({wanted}); missing: {', '.join(missing)}")
    try:
        # Not `transformers.cli.transformers`: its other commands want packages that a server can do without.
        from transformers.cli.serve import Serve
    except ImportError as error:
        raise UserError(f"this Transformers has no server that can be imported: {error}") from error
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(Serve)
    return typer.main.get_command(app)


def _understood(command: Any, arguments: list[str]) -> Any:
    """The context of a call of the server. Raises UserError for options that it lacks, and typer.Exit after help."""
    # typer shows this subclass of its usage errors only.
    usage_error: Any = typer.BadParameter.__base__
    try:
        return command.make_context("transformers serve", arguments)
    except usage_error as error:
        raise UserError(f"transformers serve: {error.format_message()}") from error


def check_place(options: dict[str, Any], *, stock: bool) -> None:
    """UserError for a dtype that the model does not run in, or a device without kernels where ours are to run.

    options  of Transformers' server, with its defaults
    """
    dtype = str(options.get("dtype") or "auto")
    if dtype not in DTYPES:
        raise UserError(f"--dtype: wanted one of {', '.join(DTYPES)}; got {dtype}")
    if stock:
        return
    device = str(options.get("device") or "auto")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    supported = device_supported(check_device(int(device) if device.isdecimal() else device))
    if not supported:
        raise UserError(f"--device {supported}")


def check_servable(name: str, plug: Any) -> None:
    """UserError for a model without sparse layers that FlashQSA serves; `name` is a folder, or a name on the hub."""
    transformers = transformers_module()
    repository, _, revision = name.partition("@")
    try:
        config = transformers.AutoConfig.from_pretrained(repository, revision=revision or "main")
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{name}: Transformers cannot read its configuration: {error}") from error
    try:
        plug.spec_of_config(config)
        plug.sparse_layer_ids(config)
    except plug.UnsupportedModelError as error:
        raise UserError(f"{name}: FlashQSA cannot stand in for its sparse layers: {error}") from error


def _make_hub_folder() -> None:
    """Makes the folder of downloaded models: without it the server's list of models is an error, not empty."""
    from huggingface_hub import constants

    with contextlib.suppress(OSError):
        Path(constants.HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def _model_on_disk(serving: Serving) -> Iterator[str]:
    """What Transformers loads: the model as it was named, or a folder that a preset is written to meanwhile."""
    if serving.model not in PRESETS:
        yield serving.model
        return
    with tempfile.TemporaryDirectory(prefix="flashqsa-") as folder:
        write_preset(serving.model, Path(folder), seed=serving.seed)
        yield folder
