"""vLLM's `vllm.transformers_utils`."""
