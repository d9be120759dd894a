"""Lets vLLM be imported where torchvision, torchaudio and torchcodec are builds for CUDA and torch is one for CPUs.

PyTorch's CPU index has builds that fit; an index without them gives those for CUDA, whose libraries cannot load there.
vLLM needs torchvision's import and not one of its operators, and the others not at all. Where the imports work already,
nothing is changed. Run it with the Python of the environment that is to be changed.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

SCHEMAS = """
# Without its operators torchvision still describes two of them, so their schemas are made here.
if not _has_ops():
    _SCHEMAS = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _SCHEMAS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def import_fault(name: str) -> str | None:
    """The last line of what importing a package says in a fresh process, or None where it works."""
    done = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stderr.strip().rpartition("\n")[2]


def fit_torchvision() -> None:
    """Has torchvision imported without its operators, or ends with what stands against it."""
    fault = import_fault("torchvision")
    if fault is None:
        return
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None or "operator torchvision::" not in fault:
        sys.exit(f"torchvision cannot be imported: {fault}")
    extension = Path(found.origin).with_name("extension.py")
    extension.write_text(extension.read_text("utf-8") + SCHEMAS, "utf-8")
    if (left := import_fault("torchvision")) is not None:
        sys.exit(f"torchvision cannot be imported: {left}")
    sys.stderr.write("torchvision's operators do not load beside this torch: it was made to import without them\n")


def drop(name: str) -> None:
    """Removes a package where it is installed and cannot be imported: Transformers would try to."""
    if importlib.util.find_spec(name) is None or import_fault(name) is None:
        return
    subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", name], check=True)
    sys.stderr.write(f"{name} does not load beside this torch: it was removed\n")


if __name__ == "__main__":
    if sys.prefix == sys.base_prefix:
        sys.exit("run this with the Python of a virtual environment: it changes packages there")
    fit_torchvision()
    drop("torchaudio")
    drop("torchcodec")
