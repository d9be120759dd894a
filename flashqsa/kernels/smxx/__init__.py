"""Kernels in Triton for GPUs of compute capability 8.0 and newer: scores and top-k. No route leads here yet."""
