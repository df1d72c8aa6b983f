"""The worker: one device's share of the model, its KV cache, its permanent rows, and one forward pass a step."""
