"""Recurrent layers: what they keep of a request."""
