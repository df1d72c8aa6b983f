"""Where a request stops."""

import pytest

from octavo.scheduler.request import Request
from octavo.types.outputs import FinishReason
from tests.scheduler.fake_worker import EOS, make_request

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("options", "sampled", "expected"),
    [
        ({}, [5, 6], (2, None, None)),
        ({}, [5, EOS, 6], (2, STOP, None)),
        ({"ignore_eos": True}, [EOS, 5], (2, None, None)),
        ({"stop_token_ids": [9]}, [9], (1, STOP, 9)),
        ({"stop_token_ids": [EOS]}, [EOS], (1, STOP, None)),
        ({"stop_token_ids": [EOS], "ignore_eos": True}, [EOS], (1, STOP, EOS)),
        ({"max_tokens": 2}, [5, 6, 7], (2, LENGTH, None)),
        ({"max_tokens": 2}, [5, EOS], (2, STOP, None)),
        ({"min_tokens": 2}, [EOS, 5, EOS], (3, STOP, None)),
        ({"min_tokens": 2, "max_tokens": 2}, [EOS, EOS, 5], (2, LENGTH, None)),
        ({"max_tokens": None}, [5] * 10, (7, LENGTH, None)),
        ({"output_token_ids": [1, 2], "max_tokens": 4}, [5, 6, 7], (2, LENGTH, None)),
        ({"output_token_ids": [1, 2], "min_tokens": 2}, [EOS], (1, STOP, None)),
    ],
)
def test_stop(options: dict, sampled: list[int], expected: tuple) -> None:
    request = Request(make_request("r", [1, 2, 3], **options), 0, 0, 10, 1)
    assert request.find_stop(sampled) == expected


def test_output_given_counts_as_output() -> None:
    request = Request(make_request("r", [1, 2, 3], output_token_ids=[4, 5]), 0, 0, 100, 1)
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_tokens) == (3, 2, 5)
