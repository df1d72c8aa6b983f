"""vLLM's `vllm.entrypoints.cli`."""
