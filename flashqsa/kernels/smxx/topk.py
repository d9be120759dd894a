"""Exact top-k: the CUDA C++ kernels that all NVIDIA GPUs share, since Triton has no atomics on shared memory."""

from flashqsa.kernels.nvrtc.topk import topk

__all__ = ["topk"]
