"""What tests run under: few threads, no FLASHQSA_* variable, heeded interrupts, no GPU test without a GPU."""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec

import pytest
import torch

# The tests' shapes gain nothing from a second thread, and where others share the cores every parallel region waits for
# its last thread to be scheduled: ten times as long for the command line's tests.
torch.set_num_threads(1)

for _name in [name for name in os.environ if name.startswith("FLASHQSA_")]:
    del os.environ[_name]

if not torch.cuda.is_available():
    # Triton reads it when kernels are defined, so it stands before any test imports them.
    os.environ["TRITON_INTERPRET"] = "1"

# Who runs tests in the background (`&` in a script) has them ignore interrupts, and tests of interruptions send some.
for _signal, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (getattr(signal, "SIGQUIT", None), signal.SIG_DFL),
):
    if _signal is not None and signal.getsignal(_signal) == signal.SIG_IGN:
        signal.signal(_signal, _usual)

os.environ["HF_HUB_OFFLINE"] = "1"  # models are made here; nothing may wait for a network

if find_spec("hypothesis"):  # absent where only the GPU tests run
    from hypothesis import HealthCheck, settings

    # No deadline and no health check on time: a shared machine may be slow. CI draws the same examples on every run.
    settings.register_profile(
        "flashqsa",
        deadline=None,
        derandomize="CI" in os.environ,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("flashqsa")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked gpu where torch sees no NVIDIA GPU."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="torch sees no NVIDIA GPU here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
