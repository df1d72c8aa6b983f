"""Mixtures of experts: the router, the experts' weights, and the block that models put where a dense one has its MLP."""
