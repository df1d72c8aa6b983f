"""Verse by rule: lines of ten syllables to fill prompts with natural-looking text that belongs to nobody."""

import numpy as np

# Words by role, all of one or two syllables; a line is ten syllables: the patterns below add up.
_WORDS = {
    "the": ["the", "this", "that", "each", "one", "some", "our", "their"],
    "adjective1": ["pale", "soft", "cold", "bright", "slow", "green", "deep", "still", "grey", "warm"],
    "adjective2": [
        "quiet",
        "golden",
        "hidden",
        "silver",
        "broken",
        "early",
        "distant",
        "hollow",
        "patient",
        "restless",
    ],
    "noun1": ["stone", "field", "lamp", "road", "wind", "rain", "bell", "bird", "leaf", "hill", "tide", "door"],
    "noun2": ["river", "garden", "window", "harbour", "morning", "shadow", "mountain", "winter", "thunder", "ember"],
    "verb1": ["turns", "waits", "falls", "burns", "sings", "bends", "drifts", "sleeps", "calls", "glows"],
    "verb2": ["remains", "returns", "arrives", "dissolves", "awakes", "retreats", "unfolds", "ascends"],
    "place": ["above", "below", "beside", "beyond", "between", "behind", "against", "before"],
}
_SYLLABLES = {"the": 1, "adjective1": 1, "adjective2": 2, "noun1": 1, "noun2": 2, "verb1": 1, "verb2": 2, "place": 2}
_PATTERNS = [
    "the adjective2 noun1 verb1 place the noun2",
    "the adjective1 noun2 verb2 place the noun1",
    "the noun2 verb1 place the adjective2 noun1",
    "place the noun2 the adjective2 noun1 verb1",
    "place the noun1 the adjective1 noun2 verb2",
]
SYLLABLES = 10

assert all(sum(_SYLLABLES[role] for role in pattern.split()) == SYLLABLES for pattern in _PATTERNS)


def lines_of_verse(num_lines: int, rng: np.random.Generator) -> list[str]:
    """`num_lines` lines, the same for the same generator."""
    lines = []
    for i in range(num_lines):
        roles = _PATTERNS[rng.integers(len(_PATTERNS))].split()
        words = [_WORDS[role][rng.integers(len(_WORDS[role]))] for role in roles]
        lines.append(" ".join(words).capitalize() + (",", ";", ",", ".")[i % 4])
    return lines
