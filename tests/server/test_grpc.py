"""The gRPC server, driven by a client that protoc generated from a .proto of its own."""

import asyncio
import importlib
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_tools import protoc

from octavo.config.args import EngineArgs
from octavo.config.server_args import ServerArgs
from octavo.engine.async_llm import AsyncLLM
from octavo.errors import ConfigError, RequestFailedError
from octavo.metrics import StatCollector
from octavo.server.grpc.listener import GrpcServer, check_args
from octavo.server.launch import bound_socket
from octavo.types.pooling_params import PoolingParams
from tests.server.certificates import make_certificates
from tests.server.fake_engine import FakeEngine, make_tokenizer

# What a client has: the wire as clients of this service know it, cut to what is called here.
PROTO = """
syntax = "proto3";
package vllm.grpc.engine;
service VllmEngine {
  rpc Generate(GenerateRequest) returns (stream GenerateResponse);
  rpc Embed(EmbedRequest) returns (EmbedResponse);
  rpc HealthCheck(Empty) returns (HealthCheckResponse);
  rpc Abort(AbortRequest) returns (Empty);
  rpc GetModelInfo(Empty) returns (GetModelInfoResponse);
  rpc GetServerInfo(Empty) returns (GetServerInfoResponse);
  rpc GetLoads(Empty) returns (GetLoadsResponse);
  rpc Unknown(Empty) returns (Empty);
}
message Empty {}
message Choices { repeated string choices = 1; }
message SamplingParams {
  optional float temperature = 1; float top_p = 2; uint32 top_k = 3; float min_p = 4;
  float frequency_penalty = 5; float presence_penalty = 6; float repetition_penalty = 7;
  optional uint32 max_tokens = 8; uint32 min_tokens = 9; repeated string stop = 10;
  repeated uint32 stop_token_ids = 11; bool skip_special_tokens = 12; bool spaces_between_special_tokens = 13;
  bool ignore_eos = 14; uint32 n = 15; optional int32 logprobs = 22; optional int32 prompt_logprobs = 23;
  optional int32 seed = 24; bool include_stop_str_in_output = 25; map<int32, float> logit_bias = 26;
  optional int32 truncate_prompt_tokens = 27;
  oneof constraint { string json_schema = 16; string regex = 17; string grammar = 18; string structural_tag = 19;
    bool json_object = 20; Choices choice = 21; }
}
message TokenizedInput { string original_text = 1; repeated uint32 input_ids = 2; }
message Media { bytes pixel_values = 2; }
message GenerateRequest {
  string request_id = 1; oneof input { TokenizedInput tokenized = 2; string text = 3; }
  SamplingParams sampling_params = 4; bool stream = 5; optional Media mm_inputs = 7;
  optional int32 data_parallel_rank = 9;
}
message Top { repeated float values = 1; repeated uint32 token_ids = 2; }
message OutputLogProbs { repeated float token_logprobs = 1; repeated uint32 token_ids = 2; repeated Top top_logprobs = 3; }
message Maybe { optional float value = 1; }
message InputLogProbs { repeated Maybe token_logprobs = 1; repeated uint32 token_ids = 2; repeated Top top_logprobs = 3; }
message Chunk {
  repeated uint32 token_ids = 1; uint32 prompt_tokens = 2; uint32 completion_tokens = 3; uint32 cached_tokens = 4;
  OutputLogProbs output_logprobs = 5; InputLogProbs input_logprobs = 6; uint32 index = 7;
}
message Complete {
  repeated uint32 output_ids = 1; string finish_reason = 2; uint32 prompt_tokens = 3; uint32 completion_tokens = 4;
  uint32 cached_tokens = 5; OutputLogProbs output_logprobs = 6; InputLogProbs input_logprobs = 7; uint32 index = 8;
  oneof matched_stop { uint32 matched_token_id = 10; string matched_stop_str = 11; }
}
message GenerateResponse { oneof response { Chunk chunk = 1; Complete complete = 2; } }
message EmbedRequest { string request_id = 1; TokenizedInput tokenized = 2; }
message EmbedResponse { repeated float embedding = 1; }
message HealthCheckResponse { bool healthy = 1; string message = 2; }
message AbortRequest { repeated string request_ids = 1; }
message GetModelInfoResponse {
  string model_path = 1; bool is_generation = 2; uint32 max_context_length = 3; uint32 vocab_size = 4;
  bool supports_vision = 5; string served_model_name = 6; string tokenizer_path = 7; string model_type = 8;
  repeated string architectures = 9; repeated int32 eos_token_ids = 10; int32 pad_token_id = 11;
  int32 bos_token_id = 12; int32 max_req_input_len = 13; string default_sampling_params_json = 14;
}
message GetServerInfoResponse { uint32 active_requests = 1; bool is_paused = 2; string server_type = 5; }
message Load {
  int32 num_running_reqs = 2; int32 num_waiting_reqs = 3; double token_usage = 7; int32 max_running_requests = 11;
}
message GetLoadsResponse { string version = 2; int32 dp_rank_count = 3; repeated Load loads = 4; }
"""


@pytest.fixture(scope="session")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The generated modules: `pb` has the messages, `stub` makes a client."""
    folder = tmp_path_factory.mktemp("generated")
    (folder / "their_engine.proto").write_text(PROTO)
    words = ["protoc", f"-I{folder}", f"--python_out={folder}", f"--grpc_python_out={folder}", "their_engine.proto"]
    assert protoc.main(words) == 0
    sys.path.insert(0, str(folder))
    try:
        pb, stubs = (importlib.import_module(f"their_engine_{name}") for name in ("pb2", "pb2_grpc"))
    finally:
        sys.path.remove(str(folder))
    return SimpleNamespace(pb=pb, stub=stubs.VllmEngineStub)


@asynccontextmanager
async def serving(
    engine: FakeEngine | None = None, stats: StatCollector | None = None, **args: Any
) -> AsyncIterator[GrpcServer]:
    server_args = ServerArgs(grpc=True, port=0, **args)
    started = asyncio.Event()
    with bound_socket(server_args) as listener:
        server = GrpcServer(engine or FakeEngine(), server_args, stats, started.set)
        task = asyncio.create_task(server.serve([listener]))
        await started.wait()
        try:
            yield server
        finally:
            server.should_exit = True
            await task


@asynccontextmanager
async def client(generated: Any, *given: Any, **args: Any) -> AsyncIterator[Any]:
    async with serving(*given, **args) as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield generated.stub(channel)


def ask(pb: Any, text: str = "Hi", *, stream: bool = True, **params: Any) -> Any:
    tokenized = pb.TokenizedInput(original_text=text, input_ids=make_tokenizer().encode(text))
    return pb.GenerateRequest(tokenized=tokenized, stream=stream, sampling_params=pb.SamplingParams(**params))


async def status(call: Any) -> Any:
    """The status with which a call fails."""
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    return failure.value.code(), failure.value.details()


async def test_generate_streamed_and_whole(generated):
    pb = generated.pb
    async with client(generated) as stub:
        answers = [answer async for answer in stub.Generate(ask(pb))]
        (whole,) = [answer async for answer in stub.Generate(ask(pb, stream=False))]
        (from_text,) = [answer async for answer in stub.Generate(pb.GenerateRequest(text="Hi"))]
    *chunks, last = answers
    assert all(answer.WhichOneof("response") == "chunk" for answer in chunks) and len(chunks) > 2
    complete = last.complete
    token_ids = [token_id for answer in chunks for token_id in answer.chunk.token_ids]
    assert token_ids == list(complete.output_ids) == list(whole.complete.output_ids)
    assert make_tokenizer().decode(token_ids) == "Hello there"
    assert (complete.finish_reason, complete.WhichOneof("matched_stop")) == ("stop", None)
    assert [a.chunk.completion_tokens for a in chunks] == sorted(a.chunk.completion_tokens for a in chunks)
    assert complete.completion_tokens == len(token_ids) and complete.prompt_tokens == 2
    assert list(from_text.complete.output_ids) == token_ids and from_text.complete.prompt_tokens == 2


async def test_several_answers_are_told_apart(generated):
    engine = FakeEngine(script=lambda prompt, params, index: f"answer {index}")
    async with client(generated, engine) as stub:
        answers = [answer async for answer in stub.Generate(ask(generated.pb, n=3))]
    for index in range(3):
        joined = [i for a in answers if a.HasField("chunk") and a.chunk.index == index for i in a.chunk.token_ids]
        (complete,) = [a.complete for a in answers if a.HasField("complete") and a.complete.index == index]
        assert make_tokenizer().decode(joined) == f"answer {index}" and list(complete.output_ids) == joined


async def test_logprobs(generated):
    async with client(generated) as stub:
        request = ask(generated.pb, "Hello", logprobs=2, prompt_logprobs=1)
        first, *chunks, last = [answer async for answer in stub.Generate(request)]
    prompt = first.chunk.input_logprobs
    assert list(prompt.token_ids) == make_tokenizer().encode("Hello")
    assert not prompt.token_logprobs[0].HasField("value") and prompt.token_logprobs[1].value == pytest.approx(-0.5)
    assert not any(answer.chunk.HasField("input_logprobs") for answer in chunks)
    output = last.complete.output_logprobs
    assert list(output.token_ids) == list(last.complete.output_ids)
    assert list(output.token_logprobs) == pytest.approx([-0.5] * len(output.token_ids))
    assert all(len(top.values) == 2 and top.values[0] >= top.values[1] for top in output.top_logprobs)
    assert list(first.chunk.output_logprobs.token_ids) == list(first.chunk.token_ids)


async def test_parameters_reach_the_engine(generated):
    engine = FakeEngine()
    params = {
        "temperature": 0.5, "top_p": 0.75, "top_k": 3, "min_p": 0.25, "frequency_penalty": 0.5, "presence_penalty": -0.5,
        "repetition_penalty": 1.5, "max_tokens": 9, "min_tokens": 1, "stop": ["END"], "stop_token_ids": [7],
        "skip_special_tokens": True, "ignore_eos": True, "seed": 5, "logit_bias": {7: 2.0},
    }  # fmt: skip
    async with client(generated, engine) as stub:
        async for _ in stub.Generate(ask(generated.pb, **params)):
            pass
        async for _ in stub.Generate(ask(generated.pb, regex="a+")):
            pass
        async for _ in stub.Generate(ask(generated.pb, choice=generated.pb.Choices(choices=["a", "b"]))):
            pass
    sent, regex, choice = engine.params
    assert {name: getattr(sent, name) for name in params} == params
    # Zero is no value of these: it is the default.
    assert (regex.temperature, regex.top_p, regex.repetition_penalty, regex.n, regex.max_tokens) == (1, 1, 1, 1, None)
    assert regex.structured_outputs.regex == "a+" and choice.structured_outputs.choice == ["a", "b"]
    assert (sent.detokenize, regex.detokenize) == (True, False)


async def test_matched_stops(generated):
    async with client(generated, FakeEngine(script=lambda *_: "H t x")) as stub:
        (answer,) = [answer async for answer in stub.Generate(ask(generated.pb, stop=["t"], stream=False))]
        assert (answer.complete.finish_reason, answer.complete.matched_stop_str) == ("stop", "t")
        (answer,) = [answer async for answer in stub.Generate(ask(generated.pb, max_tokens=2, stream=False))]
        assert answer.complete.finish_reason == "length"


async def test_wrong_requests_have_a_status(generated):
    pb = generated.pb
    codes = grpc.StatusCode
    tokens = pb.TokenizedInput(input_ids=[5, 999_999])
    cases: list[tuple[Any, Any, str]] = [
        (pb.GenerateRequest(), codes.INVALID_ARGUMENT, "tokenized or text"),
        (pb.GenerateRequest(tokenized=pb.TokenizedInput()), codes.INVALID_ARGUMENT, "empty"),
        (pb.GenerateRequest(tokenized=tokens), codes.INVALID_ARGUMENT, "999999"),
        (ask(pb, temperature=9), codes.INVALID_ARGUMENT, "temperature"),
        (ask(pb, n=1000), codes.INVALID_ARGUMENT, "n=1000"),
        (ask(pb, "x" * 500), codes.INVALID_ARGUMENT, "context"),
        (pb.GenerateRequest(text="x", mm_inputs=pb.Media()), codes.UNIMPLEMENTED, "mm_inputs"),
        (pb.GenerateRequest(text="x", data_parallel_rank=0), codes.UNIMPLEMENTED, "data_parallel_rank"),
    ]
    async with client(generated) as stub:
        for request, code, words in cases:
            found, details = await status(stub.Generate(request))
            assert found is code and words in details
        assert (await status(stub.Embed(pb.EmbedRequest())))[0] is codes.UNIMPLEMENTED
        assert (await status(stub.Unknown(pb.Empty())))[0] is codes.UNIMPLEMENTED
        assert len([answer async for answer in stub.Generate(ask(pb))]) > 1


async def test_failures_have_a_status(generated):
    async with client(generated, FakeEngine(fail_after=1)) as stub:
        assert (await status(stub.Generate(ask(generated.pb))))[0] is grpc.StatusCode.UNAVAILABLE
    engine = FakeEngine(fail_after=0, failure=RequestFailedError("a kernel failed"))
    async with client(generated, engine) as stub:
        assert await status(stub.Generate(ask(generated.pb))) == (grpc.StatusCode.INTERNAL, "a kernel failed")
    async with client(generated, FakeEngine(fail_after=0, failure=OSError("/secret/path"))) as stub:
        code, details = await status(stub.Generate(ask(generated.pb)))
        assert code is grpc.StatusCode.INTERNAL and "secret" not in details


async def test_deadline_and_cancel_end_the_request(generated):
    for end in ("deadline", "cancel"):
        engine = FakeEngine(hold_after=1)
        async with client(generated, engine) as stub:
            call = stub.Generate(ask(generated.pb), timeout=0.5 if end == "deadline" else None)
            assert (await call.read()).HasField("chunk")
            await engine.reached.wait()
            if end == "cancel":
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call.read()
            else:
                assert (await status(call.read()))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
            await engine.idle.wait()
            assert engine.running == [] and len(engine.aborted) == 1
            info = await stub.GetServerInfo(generated.pb.Empty())
            assert info.active_requests == 0


async def test_abort(generated):
    engine = FakeEngine(hold_after=1)
    request = ask(generated.pb)
    request.request_id = "mine"
    async with client(generated, engine) as stub:
        call = stub.Generate(request)
        await engine.reached.wait()
        assert engine.running == ["mine"]
        await stub.Abort(generated.pb.AbortRequest(request_ids=["mine", "unknown"]))
        *_, last = [answer async for answer in call]
    assert last.complete.finish_reason == "abort"


async def test_health(generated):
    engine = FakeEngine()
    async with serving(engine) as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub, standard = generated.stub(channel), health_pb2_grpc.HealthStub(channel)
        assert (await stub.HealthCheck(generated.pb.Empty())).healthy
        for name in ("", "vllm.grpc.engine.VllmEngine"):
            updates = standard.Watch(health_pb2.HealthCheckRequest(service=name))
            async for update in updates:
                if update.status == update.SERVING:
                    break
            updates.cancel()
        assert (await standard.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        engine.dead = True
        answer = await stub.HealthCheck(generated.pb.Empty())
        assert not answer.healthy and "gone" in answer.message
        async for update in standard.Watch(health_pb2.HealthCheckRequest()):
            if update.status == update.NOT_SERVING:
                break


async def test_information(generated):
    stats = StatCollector("tiny", 128)
    stats.num_running, stats.num_waiting, stats.kv_cache_usage = 3, 2, 0.5
    async with client(generated, FakeEngine(), stats) as stub:
        empty = generated.pb.Empty()
        model = await stub.GetModelInfo(empty)
        assert (model.model_path, model.served_model_name, model.max_context_length) == ("org/tiny", "tiny", 128)
        assert model.is_generation and list(model.architectures) == ["LlamaForCausalLM"]
        assert json.loads(model.default_sampling_params_json) == {}
        server = await stub.GetServerInfo(empty)
        assert (server.active_requests, server.is_paused, server.server_type) == (0, False, "octavo-grpc")
        (load,) = (await stub.GetLoads(empty)).loads
        assert (load.num_running_reqs, load.num_waiting_reqs, load.token_usage, load.max_running_requests) == (
            3,
            2,
            0.5,
            8,
        )
    async with client(generated) as stub:
        assert (await status(stub.GetLoads(empty)))[0] is grpc.StatusCode.UNIMPLEMENTED


async def test_reflection_tells_the_service(generated):
    """A client that knows nothing finds the services, and the messages of this one with the numbers of the wire."""
    from google.protobuf import descriptor_pb2

    async with serving() as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)

        async def reflect(**request: Any) -> Any:
            async for answer in stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(**request)])):
                return answer

        names = {service.name for service in (await reflect(list_services="")).list_services_response.service}
        assert {"vllm.grpc.engine.VllmEngine", "grpc.health.v1.Health"} < names
        found = await reflect(file_containing_symbol="vllm.grpc.engine.VllmEngine")
        file = descriptor_pb2.FileDescriptorProto.FromString(found.file_descriptor_response.file_descriptor_proto[0])
        ours = {m.name: {f.name: f.number for f in m.field} for m in file.message_type}
        theirs = generated.pb.DESCRIPTOR.message_types_by_name
        for name in ("SamplingParams", "GenerateRequest", "TokenizedInput", "GetModelInfoResponse"):
            fields = {field.name: field.number for field in theirs[name].fields}
            assert fields.items() <= ours[name].items()
        health = await reflect(file_containing_symbol="grpc.health.v1.Health")
        assert health.file_descriptor_response.file_descriptor_proto


async def test_keys(generated):
    async with client(generated, api_key=["one", "two"]) as stub:
        empty = generated.pb.Empty()
        for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", "one"),), (("x-api-key", "x"),)):
            assert (await status(stub.GetModelInfo(empty, metadata=metadata)))[0] is grpc.StatusCode.UNAUTHENTICATED
            call = stub.Generate(ask(generated.pb), metadata=metadata)
            assert (await status(call))[0] is grpc.StatusCode.UNAUTHENTICATED
        for metadata in ((("authorization", "Bearer two"),), (("x-api-key", "one"),)):
            assert (await stub.GetModelInfo(empty, metadata=metadata)).served_model_name == "tiny"
    async with (
        serving(api_key="one") as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        assert await health.Check(health_pb2.HealthCheckRequest())
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        assert (await status(stub.ServerReflectionInfo(iter([request]))))[0] is grpc.StatusCode.UNAUTHENTICATED


async def test_tls_with_client_certificates(generated, tmp_path):
    files = make_certificates(tmp_path)
    tls = {
        "ssl_keyfile": files.key,
        "ssl_certfile": files.certificate,
        "ssl_ca_certs": files.authority,
        "ssl_cert_reqs": 2,
    }
    root = Path(files.authority).read_bytes()
    pair = (Path(files.client_key).read_bytes(), Path(files.client_certificate).read_bytes())
    async with serving(**tls) as server:
        for credentials, is_let_in in (
            (grpc.ssl_channel_credentials(root, *pair), True),
            (grpc.ssl_channel_credentials(root), False),
        ):
            async with grpc.aio.secure_channel(f"localhost:{server.port}", credentials) as channel:
                call = generated.stub(channel).GetModelInfo(generated.pb.Empty())
                if is_let_in:
                    assert (await call).served_model_name == "tiny"
                else:
                    assert (await status(call))[0] is grpc.StatusCode.UNAVAILABLE


async def test_unix_socket_is_this_users_alone(generated, tmp_path):
    path = tmp_path / "s"
    async with serving(uds=str(path)), grpc.aio.insecure_channel(f"unix:{path}") as channel:
        assert path.stat().st_mode & 0o077 == 0
        assert (await generated.stub(channel).GetModelInfo(generated.pb.Empty())).served_model_name == "tiny"
    assert not path.exists()


async def test_draining_refuses_new_calls(generated):
    async with serving() as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        server.activity.drain()
        call = generated.stub(channel).Generate(ask(generated.pb))
        assert (await status(call))[0] is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("wrong", [{"root_path": "/x"}, {"enable_admin_routes": True}, {"max_concurrency_per_key": 3}])
def test_options_of_http_are_refused(wrong):
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} has no effect with grpc"):
        check_args(ServerArgs(grpc=True, **wrong))


def test_the_command_on_a_real_model(generated, chain_llama_dir: Path):
    """The whole way; a deadline gives the blocks back."""
    from tests.server.test_real_engine import PATIENCE, start, stop

    running = start(chain_llama_dir, "--grpc")
    try:
        with grpc.insecure_channel(running.url.removeprefix("grpc://")) as channel:
            stub, pb = generated.stub(channel), generated.pb
            request = pb.GenerateRequest(text="\n", stream=True, sampling_params=pb.SamplingParams(temperature=0))
            *_, last = stub.Generate(request, timeout=PATIENCE)
            text = make_tokenizer().decode(list(last.complete.output_ids))
            assert text == "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
            endless = pb.SamplingParams(temperature=0, ignore_eos=True)
            with pytest.raises(grpc.RpcError) as late:
                list(stub.Generate(pb.GenerateRequest(text="\n", stream=True, sampling_params=endless), timeout=0.05))
            assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            for _ in range(10_000):  # round trips
                load = stub.GetLoads(pb.Empty()).loads[0]
                if load.num_running_reqs == 0 and load.token_usage == 0:
                    break
            assert (load.num_running_reqs, load.token_usage) == (0, 0)
    finally:
        running.process.terminate()
        assert running.process.wait(PATIENCE) == 0
        stop(running)


async def test_vectors_of_a_model_that_makes_them(generated, tiny_llama_dir):
    pb = generated.pb
    args = {"runner": "pooling", "kv_cache_memory_bytes": 4 << 20, "block_size": 16, "max_num_seqs": 2}
    engine = AsyncLLM.from_engine_args(EngineArgs(model=str(tiny_llama_dir), **args))
    try:
        expected = await anext(engine.encode([7, 8, 9], PoolingParams(task="embed"), "direct"))
        async with client(generated, engine) as stub:
            answer = await stub.Embed(pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=[7, 8, 9])))
            assert list(answer.embedding) == pytest.approx(expected.outputs.data.tolist(), abs=1e-6)
            assert (await status(stub.Embed(pb.EmbedRequest())))[0] is grpc.StatusCode.INVALID_ARGUMENT
            assert not (await stub.GetModelInfo(pb.Empty())).is_generation
            assert (await status(stub.Generate(ask(pb))))[0] is grpc.StatusCode.INVALID_ARGUMENT
    finally:
        engine.shutdown()
