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

In the last run of the GPU tests of attention 114 passed and 4 failed: two by a fault of the worklist with padding rows
between the rows of one request, one by a fault of the test, one by a limit set too low. All four were mended since, and
the following has not been on a GPU either: the worklist takes no positions from padding and is bounded to 40 registers,
offsets of KV heads and tokens are 64-bit numbers in `attend`, tiles hold at most `LIST_PAD` entries, the FP8 stages of
tiles other than sm_90's, the layout of `sum_heads` and `line_order` in `score`, the set-up call of `nvrtc.driver`, and
the test that replays scores and top-k in a graph.
"""
