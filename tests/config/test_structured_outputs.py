import pytest

from octavo.config.args import EngineArgs
from octavo.config.engine import StructuredOutputsConfig
from octavo.config.structured_outputs import BACKENDS, resolve_structured_outputs
from octavo.errors import ConfigError
from octavo.structured_output import manager


def resolved(**options) -> StructuredOutputsConfig:
    return resolve_structured_outputs(EngineArgs(model="x", **options))


def test_every_spelling_of_the_backend():
    assert resolved() == StructuredOutputsConfig()
    assert resolved(structured_outputs_config={"backend": "guidance"}).backend == "llguidance"
    assert resolved(guided_decoding_backend="xgrammar").backend == "xgrammar"
    assert resolved(structured_outputs_config={"compile_timeout": 3, "disable_any_whitespace": True}) == (
        StructuredOutputsConfig(compile_timeout=3, disable_any_whitespace=True)
    )
    assert set(BACKENDS) == {"auto", *manager.BACKENDS}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"structured_outputs_config": {"backend": "outlines"}}, "backend='outlines' is not known; use auto"),
        ({"structured_outputs_config": {"backend": 3}}, "backend=3"),
        ({"structured_outputs_config": {"reasoning_parser": "x"}}, "--reasoning-parser"),
        ({"structured_outputs_config": {"compile_timeout": 0}}, "compile_timeout=0"),
        ({"structured_outputs_config": {"enable_in_reasoning": "yes"}}, "enable_in_reasoning='yes'"),
        ({"structured_outputs_config": {"backend": "auto"}, "guided_decoding_backend": "xgrammar"}, "contradict"),
        ({"guided_decoding_backend": "lm-format-enforcer"}, "lm-format-enforcer"),
    ],
)
def test_what_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        resolved(**options)
