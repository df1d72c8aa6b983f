"""Answers that follow a schema, a pattern or a grammar: which tokens may come next, from the tokens so far.

    StructuredOutputsParams ─► Constraint (checked) ─► CompiledGrammar (cached) ─► RequestGrammar (one request's state)

Integers and bytes only: what a mask does to logits is the worker's business.
"""
