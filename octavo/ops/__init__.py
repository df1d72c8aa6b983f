"""Operators. Each is its torch reference; faster providers register beside it (see `registry`)."""
