"""Text as it grows (FC-044, 046, 048) and stop strings (FC-021, 022, 024, 028) on real ids."""

import random
from collections.abc import Callable

import pytest

from octavo.tokenizer import IncrementalDetokenizer, Tokenizer
from octavo.types.sampling_params import SamplingParams
from tests.tokenizer.vocabularies import byte_fallback_without_strip, metaspace, wordpiece

PROMPT = [520, 9531]  # any text: the answer continues it
CHILI = [10813, 230, 131]  # U+1F336
DEF, GH, LETTER_I, LETTER_J = 33203, 23960, 57, 58
PARIS = 7042


def stream(
    tokenizer: Tokenizer, ids: list[int], step: int = 1, prompt: list[int] = PROMPT, **params: object
) -> list[str]:
    """The deltas of an answer whose ids arrive `step` at a time."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, SamplingParams(max_tokens=None, **params))
    chunks = [ids[i : i + step] for i in range(0, len(ids), step)]
    deltas = [detokenizer.update(chunk, finished=i == len(chunks) - 1).text for i, chunk in enumerate(chunks)]
    assert detokenizer.text == "".join(deltas)
    assert detokenizer.num_tokens == len(ids)
    return deltas


def test_emoji_arrives_whole(smol: Tokenizer) -> None:
    deltas = stream(smol, [PARIS, *CHILI, PARIS])
    assert deltas == [" Paris", "", "", "\U0001f336", " Paris"]


def test_cut_emoji_is_one_replacement_character(smol: Tokenizer) -> None:
    ids = [PARIS, *CHILI[:2]]
    assert stream(smol, ids) == [" Paris", "", "\ufffd"]
    assert stream(smol, ids, step=3) == [" Paris\ufffd"]
    assert smol.decode(ids) == " Paris\ufffd"


def test_bytes_that_lead_nowhere_are_shown_at_once(smol: Tokenizer) -> None:
    assert stream(smol, [CHILI[0], PARIS, PARIS]) == ["", "\ufffd Paris", " Paris"]


def test_skipped_special_token_does_not_break_a_character(smol: Tokenizer) -> None:
    assert "".join(stream(smol, [CHILI[0], 0, *CHILI[1:]])) == "\U0001f336"
    shown = "".join(stream(smol, [CHILI[0], 0, *CHILI[1:]], skip_special_tokens=False))
    assert shown == "\ufffd<|endoftext|>\ufffd\ufffd"


@pytest.mark.parametrize("seed", range(20))
def test_random_ids(smol: Tokenizer, seed: int) -> None:
    """FC-046: whatever a model emits, deltas join to the decoding of all ids, the library's included."""
    rng = random.Random(seed)
    # Half of the ids among the single bytes, so that broken characters abound; some beyond the vocabulary.
    ids = [rng.randrange(17, 273) if rng.random() < 0.5 else rng.randrange(49200) for _ in range(400)]
    skip = seed % 2 == 0
    whole = smol.decode(ids, skip_special_tokens=skip)
    assert whole == smol.backend.decode([i for i in ids if i < 49152], skip)
    for step in (1, 7, 400):
        assert "".join(stream(smol, ids, step, skip_special_tokens=skip)) == whole


@pytest.mark.parametrize("make", [metaspace, byte_fallback_without_strip, wordpiece, None])
def test_random_ids_of_other_vocabularies(make: Callable[[], Tokenizer] | None, spm: Tokenizer) -> None:
    tokenizer = spm if make is None else make()
    for seed in range(60):
        rng = random.Random(seed)
        ids = rng.choices(range(len(tokenizer)), k=rng.randrange(1, 40))
        skip, spaces = seed % 2 == 0, seed % 3 == 0
        params = {"skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
        whole = tokenizer.decode(ids, **params)
        for step in (1, 3):
            assert "".join(stream(tokenizer, ids, step, prompt=[], **params)) == whole


def test_answer_continues_the_prompt(spm: Tokenizer) -> None:
    """SentencePiece: the first word of an answer keeps its space, unless nothing stands before it."""
    cat = spm.token_to_id("▁cat")
    assert stream(spm, [cat, cat], prompt=spm.encode("the")) == [" cat", " cat"]
    assert stream(spm, [cat, cat], prompt=[1]) == ["cat", " cat"]


def test_library_stream_continues_the_prompt() -> None:
    tokenizer = wordpiece()
    assert stream(tokenizer, tokenizer.encode("cats sat."), prompt=tokenizer.encode("the")) == [
        " cat",
        "s",
        " sat",
        ".",
    ]


def test_some_special_tokens_may_be_text(smol: Tokenizer) -> None:
    """Marks that a server reads are not skipped with the others; the token that ends an answer is."""
    start, end = 1, 2
    ids = [PARIS, start, 0, PARIS]
    assert "".join(stream(smol, ids, shown_special_token_ids=[start])) == " Paris<|im_start|> Paris"
    assert "".join(stream(smol, ids)) == " Paris Paris"
    detokenizer = IncrementalDetokenizer(
        smol, PROMPT, SamplingParams(max_tokens=None, shown_special_token_ids=[start, end])
    )
    assert detokenizer.update([start, end], finished=True, stopped_by_token=True).text == "<|im_start|>"


def test_some_special_tokens_may_be_text_for_the_library() -> None:
    tokenizer = wordpiece()
    separator, classifier = tokenizer.token_to_id("[SEP]"), tokenizer.token_to_id("[CLS]")
    ids = [*tokenizer.encode("cats", add_special_tokens=False), separator, classifier]
    prompt = tokenizer.encode("the")
    assert "[SEP]" in "".join(stream(tokenizer, ids, prompt=prompt, shown_special_token_ids=[separator]))
    assert "[" not in "".join(stream(tokenizer, ids, prompt=prompt))


def test_stop_token_in_the_text(smol: Tokenizer) -> None:
    """FC-048: ordinary text goes when it is the stop; a special token shows only where special tokens show."""

    def answer(ids: list[int], **params: object) -> str:
        detokenizer = IncrementalDetokenizer(smol, PROMPT, SamplingParams(max_tokens=None, **params))
        delta = detokenizer.update(ids, finished=True, stopped_by_token=True)
        assert delta.num_tokens == detokenizer.num_tokens == len(ids)
        return delta.text

    assert answer([PARIS, 2]) == " Paris"
    assert answer([PARIS, 2], skip_special_tokens=False) == " Paris<|im_end|>"
    assert answer([PARIS, 2], include_stop_str_in_output=True) == " Paris"
    assert answer([DEF, PARIS]) == "DEF"
    assert answer([DEF, PARIS], include_stop_str_in_output=True) == "DEF Paris"
    assert answer([*CHILI[:1], 2]) == "\ufffd"
    assert answer([*CHILI[:1], 2], stop=["x"]) == "\ufffd"


def until_stop(tokenizer: Tokenizer, ids: list[int], step: int = 1, **params: object) -> tuple[str, int, str | None]:
    """(text, tokens, stop string) of an answer that may end early."""
    detokenizer = IncrementalDetokenizer(tokenizer, PROMPT, SamplingParams(max_tokens=None, **params))
    text = ""
    for i in range(0, len(ids), step):
        delta = detokenizer.update(ids[i : i + step], finished=i + step >= len(ids))
        text += delta.text
        if delta.stop is not None:
            break
    assert text == detokenizer.text
    return text, detokenizer.num_tokens, delta.stop


@pytest.mark.parametrize("step", [1, 2, 6])
def test_stop_over_several_tokens(smol: Tokenizer, step: int) -> None:
    """FC-021; and FC-024: which one fired, and how many tokens count."""
    ids = [PARIS, DEF, GH, LETTER_I, LETTER_J, PARIS]
    assert until_stop(smol, ids, step, stop=["DEFGHIJ"]) == (" Paris", 5, "DEFGHIJ")
    assert until_stop(smol, ids, step, stop=["GH"], include_stop_str_in_output=True) == (" ParisDEFGH", 3, "GH")
    assert until_stop(smol, ids, step, stop=["F", "EFG"]) == (" ParisDE", 2, "F")
    assert until_stop(smol, ids, step, stop=["nothing"]) == (" ParisDEFGHIJ Paris", 6, None)


def test_no_character_of_a_stop_is_shown(smol: Tokenizer) -> None:
    ids = [DEF, GH, LETTER_I, PARIS]
    assert stream(smol, ids, stop=["DEFGHIJ"]) == ["", "", "", "DEFGHI Paris"]
    assert stream(smol, ids[:2], stop=["DEFGHIJ"]) == ["", "DEFGH"]


@pytest.mark.parametrize(("stop", "text"), [("E", "D"), ("DE", ""), ("F", "DE")])
def test_stop_inside_one_token(smol: Tokenizer, stop: str, text: str) -> None:
    """FC-022: the tail of the token is not emitted, the token counts."""
    assert until_stop(smol, [DEF, GH], stop=[stop]) == (text, 1, stop)


def test_stop_of_a_broken_character(smol: Tokenizer) -> None:
    """What the end of the answer makes of pending bytes can still complete a stop."""
    assert until_stop(smol, [PARIS, CHILI[0]], stop=["s\ufffd"]) == (" Pari", 2, "s\ufffd")


def test_min_tokens(smol: Tokenizer) -> None:
    """FC-028: an early match is not acted on, neither then nor later; a later one is."""
    ids = [DEF, LETTER_I, GH, LETTER_I, LETTER_J, LETTER_I, GH, PARIS]
    assert until_stop(smol, ids, stop=["GH"], min_tokens=6) == ("DEFIGHIJI", 7, "GH")
    assert until_stop(smol, ids[:6], stop=["GH"], min_tokens=6) == ("DEFIGHIJI", 6, None)
    assert until_stop(smol, ids[:6], 6, stop=["GH"], min_tokens=4) == ("DEFIGHIJI", 6, None)
    # A match that begins early and completes late counts.
    assert until_stop(smol, ids, stop=["GHI"], min_tokens=4) == ("DEFI", 4, "GHI")


def test_without_text(smol: Tokenizer) -> None:
    for tokenizer in (smol, None):
        detokenizer = IncrementalDetokenizer(tokenizer, PROMPT, SamplingParams(detokenize=False))
        assert detokenizer.update([DEF, GH], finished=True, stopped_by_token=True) == ("", 2, None)
        assert (detokenizer.text, detokenizer.num_tokens) == ("", 2)


def test_stops_do_not_depend_on_the_cut() -> None:
    """The same text in pieces of any size gives the same answer."""
    from octavo.tokenizer.stop_strings import StopChecker

    rng = random.Random(3)
    for _ in range(2000):
        text = "".join(rng.choices("ab", k=rng.randrange(1, 14)))
        stops = ["".join(rng.choices("ab", k=rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))]
        found = [(text.index(s) + len(s), text.index(s), s) for s in stops if s in text]
        expected = (text[: min(found)[1]], min(found)[2]) if found else (text, None)
        checker, shown, fired = StopChecker(stops, False), "", None
        position = 0
        while position < len(text) and fired is None:
            size = rng.randrange(0, 4)
            released, fired = checker.push(text[position : position + size], True)
            shown, position = shown + released, position + size
        assert (shown + checker.flush(), fired) == expected
