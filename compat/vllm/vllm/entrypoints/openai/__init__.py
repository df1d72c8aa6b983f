"""vLLM's `vllm.entrypoints.openai`."""
