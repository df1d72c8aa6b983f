import importlib

import pytest

from octavo.structured_output.grammar import Backend
from octavo.structured_output.manager import BACKENDS
from tests.structured_output.bytes_vocabulary import bytes_vocabulary


@pytest.fixture(scope="module", params=sorted(BACKENDS))
def backend(request) -> Backend:
    module, _, name = BACKENDS[request.param].partition(":")
    return getattr(importlib.import_module(module), name)(bytes_vocabulary())
