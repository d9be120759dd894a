"""Tensor parallel ranks of vLLM's engine: the same texts as one rank's, and the same selections bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashqsa import capture
from flashqsa.testing.compare import same_bits
from flashqsa.values import Selection
from tests.vllm.engine import generate, on_gpu
from tests.vllm.test_generate import PROMPTS, WHOLE, differences, is_greedy

pytestmark = pytest.mark.vllm


def selections(folder: Path) -> list[Selection]:
    """The first selection of each rank."""
    found = [capture.load(path / "sparse_attention").values["selection"] for path in sorted(folder.iterdir())]
    return [selection for selection in found if isinstance(selection, Selection)]


@pytest.mark.skipif(on_gpu() and torch.cuda.device_count() < 2, reason="torch sees fewer than two GPUs")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_two_ranks_select_what_one_selects_and_say_the_same(sparse_first: Path, dtype: str, tmp_path: Path) -> None:
    # A prompt past the budget alone: it is what each rank captures first.
    rounds = [[PROMPTS[3]], PROMPTS]
    answers = {
        ranks: generate(
            sparse_first,
            rounds,
            dtype=dtype,
            max_num_batched_tokens=WHOLE,
            tensor_parallel_size=ranks,
            variables={"OMP_NUM_THREADS": "1"},
            capture=tmp_path / str(ranks),
        )
        for ranks in (1, 2)
    }
    one, two = (selections(tmp_path / str(ranks)) for ranks in (1, 2))
    assert (len(one), len(two)) == (1, 2)
    assert int(one[0].count.max()) < len(PROMPTS[3]) // 4
    for selection in two:
        assert same_bits(selection.blocks, one[0].blocks)
        assert same_bits(selection.count, one[0].count)
    for output in answers[2].rounds[1]:
        assert float(differences(sparse_first, getattr(torch, dtype), output).mean()) < 3e-3
        assert is_greedy(sparse_first, getattr(torch, dtype), output)
    assert "Worker_TP1" in answers[2].log
