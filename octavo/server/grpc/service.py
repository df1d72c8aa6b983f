"""The engine's gRPC service: token ids in, token ids out. The caller tokenizes, and reads what tokens mean itself."""

import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, cast

import grpc
from grpc.aio import ServicerContext

from octavo import __version__
from octavo.errors import ClientError, RequestFailedError, ServerError
from octavo.metrics import StatCollector
from octavo.server.activity import Activity
from octavo.server.engine_client import EngineClient
from octavo.server.errors import describe
from octavo.server.generation import ChoiceUpdate, Generation
from octavo.server.grpc.messages import METHODS, SERVICE, Messages
from octavo.server.limits import check_size
from octavo.server.prompts import PromptMaker
from octavo.server.text_machine import PlainText
from octavo.types.outputs import PositionLogprobs
from octavo.types.pooling_outputs import PoolingOutput, PoolingRequestOutput
from octavo.types.pooling_params import PoolingParams
from octavo.types.prompts import TokensPrompt
from octavo.types.sampling_params import RequestOutputKind, SamplingParams
from octavo.types.structured_outputs import StructuredOutputsParams

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
_CONSTRAINTS = {"json_schema": "json", "regex": "regex", "grammar": "grammar", "structural_tag": "structural_tag"}
# Fields of a request that ask for what is not done here.
_REFUSED = ("kv_transfer_params", "mm_inputs", "kv_transfer_params_json", "data_parallel_rank", "media_refs")


class NotServedError(ClientError):
    """The service has this call or field, and this engine does not."""

    status = 501


class EngineService:
    """The calls of `vllm.grpc.engine.VllmEngine`."""

    def __init__(
        self,
        engine: EngineClient,
        prompts: PromptMaker,
        activity: Activity,
        messages: Messages,
        stats: StatCollector | None = None,
    ):
        self.engine = engine
        self.prompts = prompts
        self.activity = activity
        self.messages = messages
        self.stats = stats
        self._started = time.monotonic()
        self._last_received = 0.0

    def handler(self) -> grpc.GenericRpcHandler:
        """What a server adds."""
        handlers = {}
        for name, (request, answer, is_stream) in METHODS.items():
            call = getattr(self, name)
            make = grpc.unary_stream_rpc_method_handler if is_stream else grpc.unary_unary_rpc_method_handler
            handlers[name] = make(
                _stream_guarded(call) if is_stream else _guarded(call),
                request_deserializer=getattr(self.messages, request).FromString,
                response_serializer=getattr(self.messages, answer).SerializeToString,
            )
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    async def Generate(self, request: Any) -> AsyncIterator[Any]:
        """Chunks as tokens come when `stream` is set, and each answer complete at its end.

        A caller that cancels or runs out of time closes this, which ends the request in the engine.
        """
        self._last_received = time.time()
        with self.activity:
            generation = await self._generation(request)
            answers = [_Answer(self.messages, index, generation) for index in range(generation.params.n)]
            async with aclosing(generation.updates()) as updates:
                async for update in updates:
                    answer = answers[update.choice]
                    answer.take(update)
                    if request.stream:
                        yield self.messages.GenerateResponse(chunk=answer.chunk(update))
                    if update.finish_reason is not None:
                        yield self.messages.GenerateResponse(complete=answer.complete(update))

    async def Embed(self, request: Any) -> Any:
        """The vector of token ids."""
        pooling = self.engine.config.pooling
        if pooling is None or "embed" not in pooling.tasks:
            raise NotServedError("this engine makes no embeddings.")
        self._last_received = time.time()
        token_ids = list(request.tokenized.input_ids)
        self.prompts.check_ids(token_ids, "tokenized.input_ids")
        prompt, request_id = TokensPrompt(prompt_token_ids=token_ids), request.request_id or f"embd-{uuid.uuid4().hex}"
        with self.activity:
            found = self.engine.encode(prompt, PoolingParams(task="embed"), request_id)
            async with aclosing(cast("AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]", found)) as outputs:
                output = await anext(outputs)
        if output.error is not None:
            raise RequestFailedError(output.error)
        vector = output.outputs.data.tolist()
        return self.messages.EmbedResponse(
            embedding=vector, prompt_tokens=len(output.prompt_token_ids), embedding_dim=len(vector)
        )

    async def HealthCheck(self, request: Any) -> Any:
        try:
            await self.engine.check_health()
        except ServerError as error:
            return self.messages.HealthCheckResponse(healthy=False, message=str(error))
        return self.messages.HealthCheckResponse(healthy=True, message="the engine computes")

    async def Abort(self, request: Any) -> Any:
        await self.engine.abort(list(request.request_ids))
        return self.messages.AbortResponse()

    async def GetModelInfo(self, request: Any) -> Any:
        config = self.engine.config
        model, tokenizer = config.model, self._tokenizer()
        return self.messages.GetModelInfoResponse(
            model_path=model.model,
            is_generation=self.engine.config.pooling is None,
            max_context_length=model.max_model_len,
            vocab_size=model.vocab_size,
            served_model_name=model.served_model_names[0],
            tokenizer_path=config.tokenizer.path or "",
            model_type=str(model.hf_config.get("model_type") or ""),
            architectures=[model.architecture],
            eos_token_ids=model.eos_token_ids,
            pad_token_id=(tokenizer and tokenizer.pad_token_id) or 0,
            bos_token_id=(tokenizer and tokenizer.bos_token_id) or 0,
            max_req_input_len=model.max_model_len - 1,
            default_sampling_params_json=json.dumps(model.default_sampling_params),
        )

    async def GetServerInfo(self, request: Any) -> Any:
        return self.messages.GetServerInfoResponse(
            active_requests=self.activity.num_active,
            is_paused=await self.engine.is_paused(),
            last_receive_timestamp=self._last_received,
            uptime_seconds=time.monotonic() - self._started,
            server_type="octavo-grpc",
            data_parallel_size=1,
        )

    async def GetLoads(self, request: Any) -> Any:
        if self.stats is None:
            raise NotServedError("loads are not counted; start the engine without --disable-log-stats.")
        running, waiting = self.stats.num_running, self.stats.num_waiting
        load = self.messages.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_total_reqs=running + waiting,
            token_usage=self.stats.kv_cache_usage,
            max_running_requests=self.engine.config.scheduler.max_num_seqs,
        )
        now = datetime.now(UTC).isoformat()
        return self.messages.GetLoadsResponse(timestamp=now, version=__version__, dp_rank_count=1, loads=[load])

    def _tokenizer(self) -> Any:
        try:
            return self.engine.tokenizer
        except ClientError:
            return None

    async def _generation(self, request: Any) -> Generation:
        for name in _REFUSED:
            if request.HasField(name):
                raise NotServedError(f"{name} is not supported by this server; leave it out.", param=name)
        if request.extra_mm_inputs:
            raise NotServedError("extra_mm_inputs is not supported by this server; leave it out.")
        kind = request.WhichOneof("input")
        if kind == "text":
            prompt = TokensPrompt(prompt_token_ids=await self.prompts.encode(request.text, True), prompt=request.text)
        elif kind == "tokenized":
            prompt = TokensPrompt(prompt_token_ids=list(request.tokenized.input_ids))
            self.prompts.check_ids(prompt["prompt_token_ids"], "input_ids")
        else:
            raise ClientError("send tokenized or text.", param="input")
        if not prompt["prompt_token_ids"]:
            raise ClientError("the prompt is empty; it must hold at least one token.", param="input")
        model = self.engine.config.model
        params = sampling_params(request.sampling_params, model.default_sampling_params, request.stream)
        check_size(params, 1, len(prompt["prompt_token_ids"]), model.max_model_len)
        request_id = request.request_id or uuid.uuid4().hex
        return Generation(self.engine, [prompt], params, request_id=request_id, priority=0, make_machine=PlainText)


def sampling_params(sent: Any, defaults: dict[str, Any], stream: bool) -> SamplingParams:
    """The engine's parameters. 0 is "not sent" where 0 is no value: top_p, repetition_penalty, n."""
    values: dict[str, Any] = dict(defaults)
    for name in ("temperature", "max_tokens", "logprobs", "prompt_logprobs", "seed", "truncate_prompt_tokens"):
        if sent.HasField(name):
            values[name] = getattr(sent, name)
    for name in ("top_p", "repetition_penalty", "n"):
        if getattr(sent, name):
            values[name] = getattr(sent, name)
    for name in ("top_k", "min_p", "frequency_penalty", "presence_penalty", "min_tokens", "skip_special_tokens"):
        values[name] = getattr(sent, name)
    for name in ("spaces_between_special_tokens", "ignore_eos", "include_stop_str_in_output"):
        values[name] = getattr(sent, name)
    values.setdefault("max_tokens", None)
    return SamplingParams(
        **values,
        stop=list(sent.stop),
        stop_token_ids=list(sent.stop_token_ids),
        logit_bias=dict(sent.logit_bias) or None,
        structured_outputs=_constraint(sent),
        detokenize=bool(sent.stop),
        output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
    )


def _constraint(sent: Any) -> StructuredOutputsParams | None:
    kind = sent.WhichOneof("constraint")
    if kind is None:
        return None
    if kind == "choice":
        return StructuredOutputsParams(choice=list(sent.choice.choices))
    if kind == "json_object":
        return StructuredOutputsParams(json_object=sent.json_object)
    return StructuredOutputsParams(**{_CONSTRAINTS[kind]: getattr(sent, kind)})


class _Answer:
    """One of the n answers as it grows."""

    def __init__(self, messages: Messages, index: int, generation: Generation):
        self.messages = messages
        self.index = index
        self.params = generation.params
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] = []

    def take(self, update: ChoiceUpdate) -> None:
        self.token_ids += update.completion.token_ids
        self.logprobs += update.completion.logprobs or []

    def chunk(self, update: ChoiceUpdate) -> Any:
        completion = update.completion
        chunk = self.messages.GenerateStreamChunk(token_ids=completion.token_ids, **self._counts(update))
        if completion.logprobs:
            chunk.output_logprobs.CopyFrom(self._output_logprobs(completion.token_ids, completion.logprobs))
        if update.is_first:
            self._add_input_logprobs(chunk, update)
        return chunk

    def complete(self, update: ChoiceUpdate) -> Any:
        complete = self.messages.GenerateComplete(
            output_ids=self.token_ids, finish_reason=update.finish_reason, **self._counts(update)
        )
        stopped_by = update.completion.stop_reason
        if isinstance(stopped_by, str):
            complete.matched_stop_str = stopped_by
        elif stopped_by is not None:
            complete.matched_token_id = stopped_by
        if self.logprobs:
            complete.output_logprobs.CopyFrom(self._output_logprobs(self.token_ids, self.logprobs))
        self._add_input_logprobs(complete, update)
        return complete

    def _counts(self, update: ChoiceUpdate) -> dict[str, int]:
        return {
            "index": self.index,
            "prompt_tokens": update.request.num_prompt_tokens,
            "completion_tokens": len(self.token_ids),
            "cached_tokens": update.request.num_cached_tokens,
        }

    def _output_logprobs(self, token_ids: list[int], positions: list[PositionLogprobs]) -> Any:
        return self.messages.OutputLogProbs(
            token_ids=token_ids,
            token_logprobs=[position[i].logprob for i, position in zip(token_ids, positions, strict=True)],
            top_logprobs=[self._top(position, self.params.logprobs) for position in positions],
        )

    def _add_input_logprobs(self, message: Any, update: ChoiceUpdate) -> None:
        token_ids, positions = update.request.prompt_token_ids, update.request.prompt_logprobs
        if self.params.prompt_logprobs is None or not positions:
            return
        found = message.input_logprobs
        found.token_ids.extend(token_ids)
        for token_id, position in zip(token_ids, positions, strict=True):
            entry = found.token_logprobs.add()
            if position is not None:  # the first token follows nothing
                entry.value = position[token_id].logprob
            found.top_logprobs.append(self._top(position or {}, self.params.prompt_logprobs))

    def _top(self, position: PositionLogprobs, k: int | None) -> Any:
        """The k likeliest, best first."""
        ranked = sorted(position.items(), key=lambda item: item[1].rank or 0)
        ranked = ranked if k == -1 else ranked[: k or 0]
        return self.messages.TopLogProbs(
            values=[logprob.logprob for _, logprob in ranked], token_ids=[token_id for token_id, _ in ranked]
        )


def _guarded(call: Callable[[Any], Awaitable[Any]]) -> Callable[[Any, ServicerContext], Awaitable[Any]]:
    async def answer(request: Any, context: ServicerContext) -> Any:
        try:
            return await call(request)
        except Exception as error:
            await _abort(context, error)

    return answer


def _stream_guarded(call: Callable[[Any], AsyncIterator[Any]]) -> Callable[[Any, ServicerContext], AsyncIterator[Any]]:
    async def answer(request: Any, context: ServicerContext) -> AsyncIterator[Any]:
        try:
            async with aclosing(call(request)) as responses:  # type: ignore[type-var]
                async for response in responses:
                    yield response
        except Exception as error:
            await _abort(context, error)

    return answer


async def _abort(context: ServicerContext, error: Exception) -> None:
    """End a call with the status that HTTP would have given, in gRPC's words."""
    found = describe(error)
    await context.abort(_CODES.get(found.status, grpc.StatusCode.INTERNAL), found.body.error.message)
