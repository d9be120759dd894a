"""Kernels for GPUs of compute capability 8.0 and newer, in Triton, and Hopper's own attention in CUDA C++.

No route leads here yet: `device.kernel_sets_for` lists `smxx` for no device, and this module has none of the functions
that `pipeline` calls. What is here are the stages as functions of their own, with their tests:

score, paging                    index scores over a paged cache, with segment maxima (`config.score_config`)
topk                             exact top-k (`nvrtc/topk.cu`, `config.topk_config`), which every NVIDIA GPU can run
worklist, attend, hopper, merge  attention of windows of rows; `sparse` runs it whole (`config.attend_shape`)

`write_index_keys`, `write_kv` and `select_everything` are not here.

Run and timed on one H200 (torch 2.11+cu130, Triton 3.6), each stage in a tree of its own, some rows of each case
compared with FP64 and selections with a full sort: `benchmarks/results/select-h200.json`,
`benchmarks/results/attend-h200.json`. On other GPUs nothing was run; the kernels compile for sm_80, sm_90 and sm_120,
and, without a GPU, tests interpret the Triton ones and run the worklist's source on the CPU.

Three changes since those runs have not been on a GPU: the worklist takes no positions from padding, offsets of KV heads
and tokens are 64-bit numbers in `attend`, and tiles hold at most `LIST_PAD` entries.
"""
