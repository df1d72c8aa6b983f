"""`--op-providers` and `--attention-backend`: an engine's choice of providers, applied to the registry."""

import importlib

import pytest

from octavo import ops
from octavo.errors import ConfigError
from octavo.ops.registry import ATTENTION_OPS, REGISTRY, force_providers

# Operators are known once their modules are imported, as layers do.
for module in ("linear", "norm", "rope", "attention"):
    importlib.import_module(f"octavo.ops.{module}")
ops.load_providers()


@pytest.fixture(autouse=True)
def back_to_preference():
    yield
    force_providers({})


def forced() -> dict[str, str]:
    return {name: each.forced for name, each in REGISTRY.items() if each.forced is not None}


def test_one_operator():
    force_providers({"rms_norm": "torch"})
    assert forced() == {"rms_norm": "torch"}
    force_providers({"linear": "torch"})
    assert forced() == {"linear": "torch"}  # an earlier engine's choice is gone


def test_every_operator_that_has_it():
    force_providers({"*": "torch"})
    assert set(forced()) == set(REGISTRY)
    force_providers({"*": "composed", "rms_norm": "torch"})
    assert forced()["rms_norm"] == "torch"
    assert {name for name, provider in forced().items() if provider == "composed"} == {
        name for name, each in REGISTRY.items() if any(p.name == "composed" for p in each.providers)
    }


def test_attention_backend():
    force_providers({}, "torch")
    assert forced() == dict.fromkeys(ATTENTION_OPS, "torch")
    force_providers({"*": "torch"}, "sdpa")
    assert forced()["paged_attention"] == "sdpa"


@pytest.mark.parametrize(
    ("choices", "backend", "message"),
    [
        ({"norm": "torch"}, None, "names 'norm', which is no operator"),
        ({"rms_norm": "cutlass"}, None, "has no provider 'cutlass'"),
        ({"*": "cutlass"}, None, "op_providers: there is no provider 'cutlass'"),
        ({}, "flash", "attention_backend: there is no provider 'flash'"),
    ],
)
def test_names_that_do_not_exist(choices, backend, message):
    with pytest.raises(ConfigError, match=message):
        force_providers(choices, backend)
