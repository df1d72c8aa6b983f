"""A name to import: adapters are not served yet."""

from typing import Any


class LoRARequest:
    """Raises when it is made."""

    def __init__(self, *args: Any, **kwargs: Any):
        raise NotImplementedError("LoRA adapters are not served yet; merge the adapter into the model.")
