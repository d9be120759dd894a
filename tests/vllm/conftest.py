"""Which runs collect these tests, and the models that they share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.models import LAYER_TYPES, write_model


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves these files alone unless `-m vllm` asks for them: then a vLLM that cannot be imported is a failure."""
    asked = config.option.markexpr.split() == ["vllm"]
    return None if asked or collection_path.is_dir() else True


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three linear layers and a sparse one, whose BF16 roundings change log-probabilities by less than is compared."""
    return write_model(tmp_path_factory.mktemp("model"), initializer_range=0.03)


@pytest.fixture(scope="session")
def loud_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with larger weights: every error shows, so it is compared in FP32."""
    return write_model(tmp_path_factory.mktemp("loud"), initializer_range=0.08)


@pytest.fixture(scope="session")
def sparse_first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sparse layer is the first: its input is the same bits on every tensor parallel rank."""
    return write_model(tmp_path_factory.mktemp("first"), initializer_range=0.03, layer_types=LAYER_TYPES[::-1])
