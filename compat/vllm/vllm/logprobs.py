"""Octavo's log probabilities."""

from octavo.types.outputs import Logprob, PositionLogprobs

PromptLogprobs = list[PositionLogprobs | None]
SampleLogprobs = list[PositionLogprobs]

__all__ = ["Logprob", "PromptLogprobs", "SampleLogprobs"]
