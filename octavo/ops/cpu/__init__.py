"""Operators of the CPU platform in C++ (csrc/cpu), registered as the provider "cpu"."""
