"""vLLM's `vllm.renderers`."""
