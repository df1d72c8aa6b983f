"""Recurrent layers: the mixers that models are written with, and what they keep of a request."""
