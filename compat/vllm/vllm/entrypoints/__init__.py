"""vLLM's `vllm.entrypoints`."""
