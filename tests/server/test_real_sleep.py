"""A served model that sleeps, wakes and is profiled, over HTTP and across its processes."""

import re
from pathlib import Path

import httpx

from tests.server.test_real_engine import PATIENCE, start, stop


def test_sleep_and_profile_over_http(chain_llama_dir, tmp_path):
    config = f'{{"torch_profiler_dir": "{tmp_path}/traces", "torch_profiler_with_stack": false}}'
    options = ("--enable-sleep-mode", "--enable-admin-routes", "--profiler-config", config)
    running = start(chain_llama_dir, *options)
    try:
        with httpx.Client(base_url=running.url, timeout=PATIENCE) as client:
            body = {"prompt": "a", "max_tokens": 30, "temperature": 0, "ignore_eos": True}

            def answer() -> str:
                return client.post("/v1/completions", json=body).json()["choices"][0]["text"]

            expected = answer()
            awake = resident_bytes(running.core_pid())
            for level in (1, 2):
                assert client.post(f"/sleep?level={level}").json() == {"status": "asleep", "level": level}
                for response in (client.post("/v1/completions", json=body), client.get("/health")):
                    assert response.status_code == 503 and response.json()["error"]["code"] == "engine_asleep"
                assert client.get("/is_sleeping").json() == {"is_sleeping": True}
                assert client.get("/health/live").status_code == 200
                state = {1: "weights_offloaded", 2: "discard_all"}[level]
                assert re.search(rf'engine_sleep_state{{.*sleep_state="{state}"}} 1.0', client.get("/metrics").text)
                assert client.post("/wake_up?tags=weights").json() == {"is_sleeping": True}
                assert client.post("/wake_up?tags=kv_cache").json() == {"is_sleeping": False}
                assert answer() == expected
            assert resident_bytes(running.core_pid()) < 1.2 * awake  # nothing piles up
            assert client.post("/start_profile").status_code == 200
            assert client.post("/start_profile").json()["error"]["code"] == "conflict"
            assert answer() == expected
            [file] = client.post("/stop_profile").json()["files"]
            assert Path(file).parent == tmp_path / "traces" and Path(file).stat().st_size > 1000
            assert client.post("/stop_profile").status_code == 409
    finally:
        stop(running)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
