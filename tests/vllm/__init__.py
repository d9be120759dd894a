"""Tests that start vLLM's engine on a CPU. They run by `make test-vllm` alone, in an environment of their own."""
