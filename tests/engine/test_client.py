"""Both ways to a core: in this process, and in a child whose life and death are real."""

import asyncio
import glob
import os
import select
import signal
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import octavo.engine.client
from octavo.engine.client import InProcessClient, ProcessClient
from octavo.engine.protocol import Heartbeat
from octavo.engine.spawn import SpawnedCore
from octavo.errors import ConfigError, EngineDeadError, LoadError, ServerError
from octavo.types.outputs import FinishReason
from octavo.types.request import EngineRequest
from octavo.types.sampling_params import SamplingParams
from tests.engine.fakes import DIE, EOS, EXECUTOR, HANG, RAISE, make_config

TIMEOUT = 20.0


def request(request_id: str, prompt: list[int], **params) -> EngineRequest:
    params = {"temperature": 0.0, "max_tokens": 8, "seed": 0} | params
    return EngineRequest(request_id, prompt, SamplingParams(**params), eos_token_ids=[EOS])


class Listener:
    """Collects what a client tells, and lets tests wait for it."""

    def __init__(self):
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.deaths: list[EngineDeadError] = []
        self._changed = asyncio.Event()

    def on_ready(self, report):
        raise AssertionError("wait_ready has said so")

    def on_outputs(self, outputs):
        for output in outputs.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason
        self._changed.set()

    def on_death(self, error):
        self.deaths.append(error)
        self._changed.set()

    async def until(self, condition) -> None:
        async with asyncio.timeout(TIMEOUT):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


@contextmanager
def started(**options):
    client = ProcessClient(SpawnedCore(EXECUTOR))
    try:
        client.configure(make_config(**options))
        client.wait_ready()
        yield client
    finally:
        client.shutdown()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_both_clients_give_the_same_answers():
    requests = [request(str(i), [5, 6, i + 3], max_tokens=5 + i) for i in range(5)]
    local = InProcessClient(make_config())
    local.add_requests(requests)
    want: dict[str, list[int]] = {}
    while local.has_work:
        for output in local.step().outputs:
            want.setdefault(output.request_id, []).extend(output.new_token_ids)

    async def remote() -> dict[str, list[int]]:
        with started(async_scheduling=True) as client:
            listener = Listener()
            client.listen(listener)
            client.add_requests(requests)
            await listener.until(lambda: len(listener.reasons) == 5)
            return listener.tokens

    assert asyncio.run(remote()) == want


def test_the_start_report_crosses():
    client = ProcessClient()
    try:
        client.configure(make_config(num_blocks=123))
        report = client.wait_ready()
        assert (report.num_blocks, report.block_size, report.memory_plan) == (123, 16, "no memory at all")
        assert "load" in report.seconds
    finally:
        client.shutdown()


@pytest.mark.parametrize(
    ("start_error", "kind"),
    [("LoadError: model.safetensors is cut off", LoadError), ("ConfigError: no such thing", ConfigError)],
)
def test_a_start_that_fails_raises_its_own_error(start_error, kind, capfd):
    with pytest.raises(kind, match=start_error.partition(": ")[2]), started(start_error=start_error):
        pass
    assert "Traceback" not in capfd.readouterr().err


def test_a_start_that_fails_unexpectedly_shows_its_trace(capfd):
    with pytest.raises(ServerError, match="RuntimeError: a bug"), started(start_error="RuntimeError: a bug"):
        pass
    lines = capfd.readouterr().err
    assert "Traceback" in lines and lines.startswith("(core ")


def test_a_core_that_dies_while_it_starts_is_noticed():
    client = ProcessClient()
    try:
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="killed by signal 9"):
            client.wait_ready()
        with pytest.raises(EngineDeadError):
            client.add_requests([request("a", [5])])
    finally:
        client.shutdown()


async def test_death_is_told_within_a_second():
    with started(max_model_len=100_000, num_blocks=7000) as client:
        listener = Listener()
        client.listen(listener)
        client.add_requests([request("a", [5], max_tokens=None, ignore_eos=True)])
        await listener.until(lambda: listener.tokens)
        killed = time.monotonic()
        os.kill(client.pid, signal.SIGKILL)
        await listener.until(lambda: listener.deaths)
        assert time.monotonic() - killed < 1.0
        assert "killed by signal 9" in str(listener.deaths[0])
        with pytest.raises(EngineDeadError, match="killed by signal 9"):
            client.check_health()
        with pytest.raises(EngineDeadError):
            await client.call("reset_prefix_cache")


async def test_a_call_that_waits_hears_of_the_death():
    with started() as client:
        listener = Listener()
        client.listen(listener)
        client.add_requests([request("a", [HANG])])
        call = asyncio.create_task(client.call("reset_prefix_cache"))
        await asyncio.sleep(0)  # it has sent its message
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(call, TIMEOUT)


async def test_the_reason_of_a_death_reaches_the_front():
    with started(max_num_seqs=1) as client:
        listener = Listener()
        client.listen(listener)
        client.add_requests([request(str(i), [RAISE]) for i in range(3)])
        await listener.until(lambda: listener.deaths)
        assert "3 steps in a row failed" in str(listener.deaths[0])
        assert listener.reasons == {"0": FinishReason.ERROR, "1": FinishReason.ERROR}


async def test_a_crash_in_a_step_is_a_death():
    with started() as client:
        listener = Listener()
        client.listen(listener)
        client.add_requests([request("a", [DIE])])
        await listener.until(lambda: listener.deaths)
        assert len(listener.deaths) == 1


async def test_a_hung_core_fails_the_health_check_and_does_not_hold_up_the_end():
    with started(stall_seconds=0.0) as client:
        client.listen(Listener())
        os.kill(client.pid, signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match="silent"):
            client.check_health()
        assert is_alive(client.pid)
        client.shutdown(timeout=0.1)
        assert not is_alive(client.pid)


def test_a_core_that_still_starts_is_ended_at_once(monkeypatch):
    monkeypatch.setattr(octavo.engine.client, "SHUTDOWN_SECONDS", 1e6)
    client = ProcessClient()
    client.shutdown()
    assert not is_alive(client.pid)


async def test_heartbeats_come_without_work(monkeypatch):
    with started() as client:
        beat = asyncio.Event()
        handle = client._handle

        def watch(message):
            if isinstance(message, Heartbeat):
                beat.set()
            handle(message)

        monkeypatch.setattr(client, "_handle", watch)
        client.listen(Listener())
        await asyncio.wait_for(beat.wait(), TIMEOUT)
        client.check_health()


async def test_abort_reaches_the_core_and_frees_its_rows():
    with started(max_model_len=100_000, num_blocks=7000) as client:
        listener = Listener()
        client.listen(listener)
        client.add_requests([request("a", [5], max_tokens=None, ignore_eos=True)])
        await listener.until(lambda: listener.tokens)
        client.abort_requests(["a"])
        await listener.until(lambda: listener.reasons)
        assert listener.reasons == {"a": FinishReason.ABORT}
        assert await client.call("reset_prefix_cache") is True  # no block is in use


async def test_calls_carry_plain_data_both_ways():
    with started() as client:
        client.listen(Listener())
        result = await client.call("collective_rpc", "echo", [1, "two", [3.0]], {"four": None})
        assert result == [[[1, "two", [3.0]], {"four": None}]]
        with pytest.raises(ServerError, match="ValueError: because"):
            await client.call("collective_rpc", "raise", ["because"])
        with pytest.raises(ServerError, match="no utility"):
            await client.call("shutdown")
        with pytest.raises(ServerError, match="plain data"):
            await client.call("collective_rpc", "echo", [object()])
        assert client._calls == {}


def test_one_client_serves_one_loop_after_another():
    with started() as client:

        async def once(request_id: str) -> list[int]:
            listener = Listener()
            client.listen(listener)
            client.add_requests([request(request_id, [5])])
            await listener.until(lambda: listener.reasons)
            return listener.tokens[request_id]

        assert asyncio.run(once("a")) == asyncio.run(once("b"))


def test_sockets_are_private_and_gone_afterwards(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with started() as client:
        [folder] = glob.glob(f"{tmp_path}/octavo-*")
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        assert sorted(os.listdir(folder)) == ["flight", "in", "out"]
        pid = client.pid
    assert not Path(folder).exists()
    assert not is_alive(pid)
    client.shutdown()  # twice is fine


def test_the_core_outlives_signals_meant_for_the_front_but_not_the_front():
    """Ctrl-C and SIGTERM reach the whole process group; a front that drains still needs its core."""
    script = (
        "import sys, time\n"
        "from tests.engine.test_client import ProcessClient, make_config\n"
        "client = ProcessClient()\n"
        "client.configure(make_config())\n"
        "client.wait_ready()\n"
        "print(client.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    front = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert front.stdin is not None and front.stdout is not None
    with front:
        pid = int(front.stdout.readline())
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
        assert is_alive(pid)
        core = os.pidfd_open(pid)
        front.kill()  # no chance to clean up
        ended, _, _ = select.select([core], [], [], TIMEOUT)
        os.close(core)
        assert ended, "the core outlived its front"


async def test_a_client_that_is_dropped_takes_its_process_along():
    client = ProcessClient()
    pid = client.pid
    del client
    assert not is_alive(pid)


def test_an_in_process_core_that_failed_stays_failed():
    client = InProcessClient(make_config(max_num_seqs=1))
    client.add_requests([request(str(i), [RAISE]) for i in range(3)])
    with pytest.raises(EngineDeadError, match="3 steps in a row failed"):
        while client.has_work:
            client.step()
    for use in (client.step, client.check_health, lambda: client.add_requests([]), lambda: client.call("x")):
        with pytest.raises(EngineDeadError, match="failed earlier"):
            use()
    client.abort_requests(["0"])
    client.shutdown()
