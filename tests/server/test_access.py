"""Who may call what: keys, CORS, root paths, and the routes that watch the server."""

import asyncio

import pytest

import octavo
from octavo.errors import ConfigError
from octavo.server.middleware import PUBLIC_PATHS
from tests.server.fake_engine import FakeEngine
from tests.server.http import chat_body, client_of, error_of, make_app, strict_json

CHAT = "/v1/chat/completions"
KEY = {"authorization": "Bearer secret"}


@pytest.mark.parametrize("root_path", ["", "/prefix"])
async def test_every_route_but_the_public_ones_needs_the_key(root_path):
    """FC-170: the route table is walked, so a new route cannot be forgotten."""
    app = make_app(
        api_key=["other", "secret"],
        enable_server_load_tracking=True,
        enable_admin_routes=True,
        enable_scale_out=True,
        responses_store_bytes=1 << 20,
        root_path=root_path,
    )
    paths = {route.path.replace("{name:path}", "tiny").replace("{response_id}", "resp_1") for route in app.routes}
    assert len(paths) > 10
    wrong = ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}, {"authorization": "Basic secret"})
    async with client_of(app=app) as client:
        for path in sorted(paths):
            for spelling in {path, root_path + path}:
                for headers in wrong:
                    for method in ("GET", "POST", "OPTIONS"):
                        status = (await client.request(method, spelling, headers=headers)).status_code
                        assert (status == 401) == (path not in PUBLIC_PATHS), (method, spelling, headers)
                assert (await client.get(spelling, headers=KEY)).status_code != 401


@pytest.mark.parametrize(
    "path",
    ["/v1/models/", "//v1/models", "/v1//models", "/%76%31/models", "/V1/models", "/health/", "//health", "/health;x", "/nope",
     "/ui", "/ui/", "/ui/page.css/", "/health/../v1/models", "/health%2f..%2fv1/models", "/metrics/x",
     "/prefix/prefix/v1/models"],
)  # fmt: skip
async def test_no_spelling_of_a_path_gets_around_the_key(path):
    """FC-170."""
    async with client_of(api_key="secret", root_path="/prefix") as client:
        response = await client.get(f"http://localhost{path}")  # whole, or two slashes would begin a host
        assert response.headers["www-authenticate"] == "Bearer"
        error_of(response, 401)


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LOCALHOST:8000", "app.localhost", "host.docker.internal:8000", "127.0.0.1:8000", "192.168.1.2"),
        *("[::1]:8000", "[::1]", "octavo.lan:80"),
    ],
)  # fmt: skip
async def test_names_that_a_server_without_keys_answers_to(host):
    async with client_of(allowed_hosts=["Octavo.lan"]) as client:
        assert (await client.post(CHAT, json=chat_body(), headers={"host": host})).status_code == 200


@pytest.mark.parametrize("host", ["evil.example:8000", "localhost.evil.example", "127.0.0.1.evil", "1localhost", "[x]"])
async def test_names_of_others_are_refused(host):
    """DNS rebinding: a page's own name points to the loopback address, and its Host header says so."""
    async with client_of() as client:
        for path in ("/", "/metrics", "/v1/models"):
            assert "--allowed-hosts" in error_of(await client.get(path, headers={"host": host}), 403)["message"]
        error_of(await client.post(CHAT, json=chat_body(), headers={"host": host}), 403)
    for args in ({"allowed_hosts": ["*"]}, {"api_key": "secret"}, {"host": "0.0.0.0"}, {"uds": "/tmp/socket"}):
        async with client_of(**args) as client:
            assert (await client.get("/v1/models", headers={"host": host} | KEY)).status_code == 200


async def test_posts_from_pages_of_other_sites_are_refused():
    """Such a post needs nobody's leave when it has no JSON body, as those that steer the engine."""
    async with client_of(enable_admin_routes=True, allowed_origins=["https://friend"]) as client:
        for origin in ("https://evil.example", "null", "http://localhost:1"):
            message = error_of(await client.post("/pause", headers={"origin": origin}), 403)["message"]
            assert "--allowed-origins" in message
        for origin in ("https://friend", "http://localhost"):
            assert (await client.post("/pause", headers={"origin": origin})).status_code == 200
        assert (await client.post("/resume")).status_code == 200


async def test_scheme_in_lower_case_and_every_key_of_several():
    async with client_of(api_key=["one", "two"]) as client:
        for value in ("bearer one", "Bearer two", "BEARER  two"):
            assert (await client.get("/v1/models", headers={"authorization": value})).status_code == 200


async def test_key_of_the_environment(monkeypatch):
    monkeypatch.setenv("OCTAVO_API_KEY", "secret")
    async with client_of() as client:
        error_of(await client.get("/v1/models"), 401)
        assert (await client.get("/v1/models", headers=KEY)).status_code == 200
    async with client_of(api_key="mine") as client:
        error_of(await client.get("/v1/models", headers=KEY), 401)


async def test_keys_of_a_file_and_by_either_header(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# of the team\nfirst\n\n  second  \n")
    async with client_of(api_key="mine", api_key_file=str(path)) as client:
        for key in ("mine", "first", "second"):
            for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
                assert (await client.get("/v1/models", headers=headers)).status_code == 200
        for headers in ({"x-api-key": ""}, {"x-api-key": "# of the team"}, {"authorization": "Bearer "}):
            error_of(await client.get("/v1/models", headers=headers), 401)
    path.write_text("# none\n")
    for wrong in ({"api_key_file": str(path)}, {"api_key_file": str(tmp_path / "none")}, {"api_key": ["a", ""]}):
        with pytest.raises(ConfigError):
            make_app(**wrong)


async def test_websocket_needs_the_key_too():
    app = make_app(api_key="secret")
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "websocket.connect"}

    await app({"type": "websocket", "path": "/v1/realtime", "headers": [], "root_path": ""}, receive, send)
    assert sent[0]["type"] == "websocket.close" and sent[0]["code"] == 1008


async def test_preflight_needs_no_key():
    """FC-163: CORS is off until origins are given; then OPTIONS is answered before the key is asked for."""
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
    async with client_of(api_key="secret", allowed_origins=["https://a.example"]) as client:
        response = await client.options(CHAT, headers=preflight)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://a.example"
        refused = await client.post(CHAT, json=chat_body(), headers={"origin": "https://a.example"})
        error_of(refused, 401)
        assert refused.headers["access-control-allow-origin"] == "https://a.example"
    async with client_of() as client:
        response = await client.options(CHAT, headers=preflight)
        error_of(response, 405)
        assert "access-control-allow-origin" not in response.headers


async def test_root_path_with_and_without_stripping_proxy():
    async with client_of(root_path="/api") as client:
        for path in ("/v1/models", "/api/v1/models", "/api/health"):
            assert (await client.get(path)).status_code == 200
        error_of(await client.get("/apiv1/models"), 404)


async def test_version_and_docs():
    async with client_of() as client:
        assert (await client.get("/version")).json() == {"version": octavo.__version__}
        described = strict_json((await client.get("/openapi.json")).content)
        assert "temperature" in described["components"]["schemas"]["ChatCompletionRequest"]["properties"]
        routes = {route.path for route in make_app().routes}
        assert set(described["paths"]) <= routes
        page = (await client.get("/docs")).text
        assert CHAT in page and "://" not in page.replace("<!doctype html>", "")
    async with client_of(disable_fastapi_docs=True) as client:
        for path in ("/docs", "/openapi.json"):
            error_of(await client.get(path), 404)


async def test_load_counts_requests_in_flight():
    engine = FakeEngine(hold_after=0)
    async with client_of(engine, enable_server_load_tracking=True) as client:
        call = asyncio.create_task(client.post(CHAT, json=chat_body()))
        await engine.reached.wait()
        assert (await client.get("/load")).json() == {"server_load": 1}
        engine.release.set()
        await call
        assert (await client.get("/load")).json() == {"server_load": 0}
    async with client_of() as client:
        error_of(await client.get("/load"), 404)


async def test_access_log(caplog):
    async with client_of() as client:
        await client.get("/v1/models", headers={"x-request-id": "id-7"})
        await client.get("/v1/models/a%0Ab")
    async with client_of(disable_uvicorn_access_log=True) as client:
        await client.get("/v1/models", headers={"x-request-id": "quiet"})
    lines = [record.getMessage() for record in caplog.records if record.name == "octavo.access"]
    assert len(lines) == 2
    assert lines[0].startswith("127.0.0.1 GET /v1/models 200 ") and lines[0].endswith(" id-7")
    assert "\n" not in lines[1] and "\\n" in lines[1]
