"""Requests made from our own OpenAPI description, right and wrong ones: none may be answered by a 5xx."""

import pytest

from octavo.server.docs import openapi
from tests.server.fake_engine import FakeEngine, make_config
from tests.server.http import make_app

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis, which makes requests from a description")

from hypothesis import HealthCheck, settings  # noqa: E402 - comes with schemathesis

EXAMPLES = 5  # of each route, besides those that try each field at its borders


def make_schema():
    engine = FakeEngine(config=make_config(max_model_len=64))
    app = make_app(engine, responses_store_bytes=1 << 16, disable_uvicorn_access_log=True)
    schema = schemathesis.openapi.from_dict(openapi())
    schema.app = app
    return schema


schema = make_schema()


@schema.parametrize()
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_breaks_a_route(case):
    response = case.call(base_url="http://localhost")
    assert response.status_code < 500 and response.status_code != 403, response.text
