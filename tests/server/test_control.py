"""Routes that steer the engine: mounted on request, and what they say."""

import asyncio
from dataclasses import replace

import pytest

from octavo.config.engine import ProfilerConfig
from tests.server.fake_engine import FakeEngine, make_config
from tests.server.http import chat_body, client_of, error_of

ROUTES = [
    *(("POST", path) for path in ("/reset_prefix_cache", "/pause", "/resume", "/sleep", "/wake_up")),
    *(("GET", path) for path in ("/server_info", "/is_sleeping")),
]


@pytest.mark.parametrize(("method", "path"), [*ROUTES, ("GET", "/is_paused")])
async def test_they_are_not_there_unless_asked_for(method, path):
    async with client_of() as client:
        error_of(await client.request(method, path), 404)


async def test_pause_and_resume():
    engine = FakeEngine()
    async with client_of(engine, enable_admin_routes=True) as client:
        assert (await client.get("/is_paused")).json() == {"is_paused": False}
        assert (await client.post("/pause")).json() == {"status": "paused"}
        assert (await client.post("/pause?mode=keep&clear_cache=false")).status_code == 200
        assert engine.pauses == [("abort", True), ("keep", False)]
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        assert (await client.post("/resume")).json() == {"status": "resumed"}
        assert (await client.get("/is_paused")).json() == {"is_paused": False}
        for query, param in (("mode=soon", "mode"), ("clear_cache=maybe", "clear_cache")):
            assert error_of(await client.post(f"/pause?{query}"), 400)["param"] == param


async def test_sleep_and_wake_up():
    engine = FakeEngine()
    async with client_of(engine, enable_admin_routes=True) as client:
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}
        assert (await client.post("/sleep?level=2&mode=wait")).json() == {"status": "asleep", "level": 2}
        assert engine.sleeps == [(2, "wait")]
        for response in (
            await client.post("/v1/chat/completions", json=chat_body()),
            await client.get("/health/ready"),
        ):
            assert error_of(response, 503)["code"] == "engine_asleep"
        assert (await client.get("/health/live")).status_code == 200
        assert (await client.post("/wake_up?tags=weights")).json() == {"is_sleeping": True}
        assert (await client.post("/wake_up?tags=kv_cache&tags=scheduling")).json() == {"is_sleeping": False}
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/sleep")).status_code == (await client.post("/wake_up")).status_code == 200
        assert engine.sleeps[1:] == [(1, "abort")] and not engine.asleep
        for level in ("3", "deep"):
            assert error_of(await client.post(f"/sleep?level={level}"), 400)["param"] == "level"


async def test_profiles_are_taken_where_there_is_a_profiler():
    async with client_of(enable_admin_routes=True) as client:
        error_of(await client.post("/start_profile"), 404)
    engine = FakeEngine(config=replace(make_config(), profiler=ProfilerConfig("/traces")))
    async with client_of(engine) as client:
        error_of(await client.post("/stop_profile"), 409)
        assert (await client.post("/start_profile")).status_code == 200
        assert error_of(await client.post("/start_profile"), 409)["code"] == "conflict"
        assert (await client.post("/stop_profile")).json() == {"status": "stopped", "files": ["/traces/one.json"]}


async def test_the_cache_of_running_requests_is_not_reset():
    engine = FakeEngine(hold_after=1)
    async with client_of(engine, enable_admin_routes=True) as client:
        running = asyncio.create_task(client.post("/v1/chat/completions", json=chat_body()))
        await engine.reached.wait()
        assert "requests are running" in error_of(await client.post("/reset_prefix_cache"), 409)["message"]
        engine.release.set()
        await running
        assert (await client.post("/reset_prefix_cache")).json() == {"reset": True}


async def test_server_info_tells_no_secret(monkeypatch):
    monkeypatch.setenv("OCTAVO_API_KEY", "from-the-environment")
    monkeypatch.setenv("OCTAVO_LOG_LEVEL", "WARNING")
    headers = {"authorization": "Bearer from-the-options"}
    async with client_of(enable_admin_routes=True, api_key="from-the-options", headers=headers) as client:
        response = await client.get("/server_info")
    info = response.json()
    assert info["config"]["model"]["served_model_names"] == ["tiny", "alias"]
    assert (info["server"]["api_key"], info["environment"]["OCTAVO_API_KEY"]) == ("***", "***")
    assert info["environment"]["OCTAVO_LOG_LEVEL"] == "WARNING"
    assert info["runtime"]["num_tasks"] >= 1
    assert "from-the" not in response.text
