"""Attention tiles for GPUs of compute capability 7.x. No such GPU was at hand: chosen by what the compiler and a count
of issue slots and bytes say (docs/kernels/attend_sm7x.md), not timed.
"""

from __future__ import annotations

KEPT_DIMS = {64: 64, 128: 128, 256: 128}
"""Dimensions of a query line that Turing keeps in registers, by head_dim; the others lie in shared memory, of which it
has 64 KiB. Volta, whose operands take twice the registers, has room for all of them in its 96 KiB."""

MOST_ROWS = 32
"""Most rows of a prefill window, the bits of a mask word. What a tile of tokens costs hardly depends on how many of the
128 query lines are in use, and the union of more rows grows slower than they do."""
