"""`thinking_token_budget` (FC-090): the end mark is forced exactly behind the budget, however the row got there."""

import pytest
import torch

from octavo.types.sampling_params import ReasoningSection
from tests.worker.test_sampler import VOCAB, Rig

START, END = [60, 61], [70, 71, 72]
OPEN = ReasoningSection(True, "<t>", "</t>", START, END, [72, 73])
CLOSED = ReasoningSection(False, "<t>", "</t>", START, END, [72, 73])
ONE_TOKEN = ReasoningSection(True, "<t>", "</t>", [60], [70])


def generate(rig: Rig, wishes: dict[int, list[int]], steps: int) -> dict[int, list[int]]:
    """What rows generate when the model wants these tokens, one a step, and 5 from then on."""
    got: dict[int, list[int]] = {row: [] for row in wishes}
    for step in range(steps):
        logits = torch.full((len(wishes), VOCAB), -20.0)
        for i, wish in enumerate(wishes.values()):
            logits[i, wish[step] if step < len(wish) else 5] = 10.0
        for row, token in zip(wishes, rig.tokens(logits, *wishes), strict=True):
            got[row].append(token)
    return got


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_the_end_is_forced_behind_the_budget(budget: int) -> None:
    rig = Rig()
    rig.add(2, reasoning=OPEN, thinking_token_budget=budget)
    assert generate(rig, {2: []}, 9)[2] == ([5] * budget + END + [5] * 9)[:9]


@pytest.mark.parametrize(
    ("wish", "got"),
    [
        ([9, 70, 71, 72, 9, 9, 9, 9], [9, 70, 71, 72, 9, 9, 9, 9]),  # it ends by itself, in time
        ([9, 70, 71, 73, 9, 9, 9, 9], [9, 70, 71, 73, 9, 9, 9, 9]),  # the mark runs into what follows
        ([9, 9, 70, 9, 9, 9, 9, 9], [9, 9, 70, 9, 70, 71, 72, 9]),  # half a mark is reasoning
        ([9, 9, 9, 70, 9, 9, 9, 9], [9, 9, 9, 70, 71, 72, 9, 9]),  # a mark that is begun is continued
    ],
)
def test_marks_of_the_model_itself(wish: list[int], got: list[int]) -> None:
    rig = Rig()
    rig.add(0, reasoning=OPEN, thinking_token_budget=4)
    assert generate(rig, {0: wish}, 8)[0] == got


def test_a_section_that_the_answer_opens() -> None:
    """Without the mark there is nothing to close; the prompt's own tokens open nothing."""
    rig = Rig()
    rig.add(0, prompt=(1, *START), reasoning=CLOSED, thinking_token_budget=2)
    rig.add(1, reasoning=CLOSED, thinking_token_budget=2)
    got = generate(rig, {0: [], 1: [9, *START, 9]}, 9)
    assert got[0] == [5] * 9
    assert got[1] == [9, *START, 9, 5, *END, 5]


def test_neighbours_and_changing_batches() -> None:
    rig = Rig()
    rig.add(0)
    rig.add(3, reasoning=ONE_TOKEN, thinking_token_budget=2)
    rig.add(4, reasoning=OPEN, thinking_token_budget=1)
    assert generate(rig, {0: [], 3: []}, 2) == {0: [5, 5], 3: [5, 5]}
    assert generate(rig, {3: [], 4: []}, 4) == {3: [70, 5, 5, 5], 4: [5, *END]}
    rig.remove(4)
    rig.add(4)
    assert generate(rig, {4: [], 0: []}, 3) == {4: [5] * 3, 0: [5] * 3}


@pytest.mark.parametrize("cut", range(10))
def test_resumed_anywhere(cut: int) -> None:
    """A row that comes back after preemption goes on as if nothing had happened."""
    for section, wish in ((OPEN, []), (CLOSED, [9, *START])):
        rig = Rig()
        rig.add(0, reasoning=section, thinking_token_budget=3)
        whole = generate(rig, {0: wish}, 10)[0]
        rig = Rig()
        rig.add(0, output=whole[:cut], reasoning=section, thinking_token_budget=3)
        assert whole[:cut] + generate(rig, {0: wish[cut:]}, 10 - cut)[0] == whole


def test_without_a_limit() -> None:
    rig = Rig()
    rig.add(0, reasoning=OPEN, thinking_token_budget=-1)
    assert generate(rig, {0: []}, 5)[0] == [5] * 5
