"""What a GGUF file says about itself: raw metadata, and the equivalent config.json and generation_config.json."""

from octavo.loader.gguf_file import read_gguf_metadata

__all__ = ["read_gguf_metadata"]
