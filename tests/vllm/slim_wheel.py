"""A vLLM wheel in pieces, without the compiled parts that Qwen4-Exp models with FlashQSA never load.

    python tests/vllm/slim_wheel.py vllm-0.32.0-*.whl FOLDER [--most-mib 60]

For a machine with a GPU that reaches no index and takes no large files: the pieces are zip files, to be unpacked
over each other in a folder of PYTHONPATH. Of 311 MiB 141 are left. vLLM 0.32's compiled parts use torch's stable
interface alone, and load in torch 2.11 as in 2.13. Beside what torch and Transformers bring, these packages are needed:
annotated-types, apache-tvm-ffi, cachetools, cbor2, compressed-tensors, fastapi, httpx2, llguidance, loguru, msgspec,
openai, opentelemetry-api, opentelemetry-sdk, opentelemetry-exporter-otlp, opentelemetry-semantic-conventions,
oss-harmony, partial-json-parser, pybase64, pydantic, pydantic-core, pyzmq, sniffio, starlette, typing-inspection,
uvicorn, watchfiles, xgrammar. vLLM finds this package's plugin by its metadata: install a wheel of it, too.
"""

from __future__ import annotations

import argparse
import sys
import zipfile
from pathlib import Path

LEFT_OUT = (
    *("/_vllm_fa2_C", "/vllm-rs", "/deep_gemm/", "/_deepselect_C", "/_flashmla", "/_flashkda", "/_qutlass"),
    *("/fmha_sm100/", "/tml_fa4/", "/swagger-ui"),
)
"""Parts of names: kernels of other attentions, models and GPUs. One of vLLM's two FlashAttentions has to stay."""


def pieces(wheel: zipfile.ZipFile, most_bytes: int) -> list[list[zipfile.ZipInfo]]:
    """The files that are kept, largest first, in as few pieces as that gives; a larger file is a piece of its own."""
    kept = [item for item in wheel.infolist() if not any(part in f"/{item.filename}" for part in LEFT_OUT)]
    found: list[list[zipfile.ZipInfo]] = []
    for item in sorted(kept, key=lambda item: -item.compress_size):
        for piece in found:
            if sum(other.compress_size for other in piece) + item.compress_size <= most_bytes:
                piece.append(item)
                break
        else:
            found.append([item])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--most-mib", type=int, default=60)
    wanted = parser.parse_args()
    wanted.folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wanted.wheel) as wheel:
        for number, piece in enumerate(pieces(wheel, wanted.most_mib << 20), 1):
            path = wanted.folder / f"vllm-{number}.zip"
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
                for item in piece:
                    out.writestr(item, wheel.read(item), zipfile.ZIP_DEFLATED, 9)
            sys.stdout.write(f"{path}: {len(piece)} files, {path.stat().st_size / 2**20:.1f} MiB\n")


if __name__ == "__main__":
    main()
