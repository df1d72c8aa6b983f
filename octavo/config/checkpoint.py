"""What is on disk for a model, as far as the configuration depends on it."""

from dataclasses import dataclass

# Formats of weights, in the order "auto" prefers them.
WEIGHT_FORMATS = ("safetensors", "pt", "gguf")


@dataclass(frozen=True)
class Checkpoint:
    """A model found on disk. `num_parameters` is 0 when nobody could tell."""

    path: str  # folder, or single GGUF file
    formats: tuple[str, ...]  # of WEIGHT_FORMATS, those there are files of
    num_parameters: int = 0
    stored_dtype: str | None = None  # "float32", …; "quantised" for blocks; None: what config.json says
    tokenizer_path: str | None = None  # folder or GGUF file
