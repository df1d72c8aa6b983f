"""A worker of integers, for tests of the scheduler: rows, block tables and a KV cache whose slots remember what is in them.

The "model": the hidden value of position p is a hash of all tokens up to p, and the next token is a hash of that and the
request's seed. A slot stores the hidden value of the token written there. Attention checks that every slot it reads holds
the value of the very prefix it should, so that any wrong sharing, early reuse, missing block or stale row is an error here.

Where there is an encoder, a hash of all that it reads takes the place of the hidden value before the first token; a slot of
cross-attention stores it plus the slot's position.
"""

from collections import deque
from dataclasses import dataclass, field

from octavo.config.engine import CacheConfig, SchedulerConfig
from octavo.scheduler.block_pool import NULL_BLOCK
from octavo.scheduler.scheduler import Scheduler
from octavo.types.kv_spec import CrossAttentionSpec, FullAttentionSpec, KVCacheConfig, KVGroup, SlidingWindowSpec
from octavo.types.outputs import EngineOutput, FinishReason, TokenLogprobs
from octavo.types.request import EngineRequest
from octavo.types.sampling_params import SamplingParams
from octavo.types.step import ModelRunnerOutput, SchedulerOutput

VOCAB = 50
EOS = 0
GARBAGE = VOCAB + 1


def extend(hidden: int, token_id: int) -> int:
    """Hidden value after one more token."""
    return (hidden * 1_000_003 + token_id + 1) & 0xFFFFFFFFFFFF


def sample(hidden: int, params: SamplingParams, masked: set[int]) -> int:
    """The token after a prefix; `masked` ids are passed over."""
    token_id = ((hidden ^ (params.seed or 0)) * 2_654_435_761 >> 12) % VOCAB
    while token_id in masked:
        token_id = (token_id + 1) % VOCAB
    return token_id


def encoded(request: EngineRequest) -> int:
    """The hidden value before the first token."""
    hidden = 0
    for token_id in () if request.encoder_input is None else request.encoder_input.token_ids:
        hidden = extend(hidden, token_id + VOCAB)
    return hidden


def solo_run(request: EngineRequest, max_model_len: int) -> tuple[list[int], FinishReason]:
    """The answer of a request that is alone in the world."""
    params = request.sampling_params
    hidden = encoded(request)
    for token_id in request.prompt_token_ids:
        hidden = extend(hidden, token_id)
    eos = set() if params.ignore_eos else set(request.eos_token_ids)
    stops = eos | set(params.stop_token_ids or ())
    output: list[int] = []
    limit = max_model_len - len(request.prompt_token_ids)
    if params.max_tokens is not None:
        limit = min(limit, params.max_tokens)
    while len(output) < limit:
        output.append(sample(hidden, params, stops if len(output) < params.min_tokens else set()))
        hidden = extend(hidden, output[-1])
        if output[-1] in stops and len(output) > params.min_tokens:
            return output, FinishReason.STOP
    return output, FinishReason.LENGTH


@dataclass
class _Row:
    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    params: SamplingParams
    stops: set[int]
    tables: list[list[int]]
    encoded: int
    num_encoder_positions: int
    hidden: list[int] = field(default_factory=list)  # of each known token


class FakeWorker:
    """Executes steps in order, at once."""

    def __init__(self, kv: KVCacheConfig):
        self.kv = kv
        self.rows: dict[int, _Row] = {}
        self.slots: list[dict[tuple[int, int], int]] = [{} for _ in kv.groups]
        is_cross = [isinstance(group.spec, CrossAttentionSpec) for group in kv.groups]
        self.growing = [i for i, cross in enumerate(is_cross) if not cross]
        self.cross = [i for i, cross in enumerate(is_cross) if cross]
        self.encoded: dict[str, int] = {}  # by request: what must be found, whoever wrote it
        self.num_encoded = 0  # positions
        self.num_prompt_tokens_computed = 0
        self.fail_request_ids: set[str] = set()  # their rows report an error and write nothing
        self.tolerates_damage = False  # rows that read something wrong sample GARBAGE instead of failing the test

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step; the result may be handed to the scheduler later."""
        for row in step.freed_rows:
            del self.rows[row]
        for new in step.new_rows:
            assert new.row not in self.rows, "a row is given out while in use"
            self.rows[new.row] = _Row(
                new.request_id,
                list(new.token_ids),
                new.num_prompt_tokens,
                new.num_computed_tokens,
                new.sampling_params,
                set(new.stop_token_ids),
                [list(table) for table in new.block_ids],
                self.encoded[new.request_id],
                new.num_encoder_positions,
            )
            if new.encoder_input is not None and new.request_id not in self.fail_request_ids:
                self._encode(self.rows[new.row])
        for blocks in step.new_blocks:
            table = self.rows[blocks.row].tables[blocks.group]
            assert len(table) == blocks.start, "blocks are not appended where the table ends"
            table += blocks.block_ids
        assert len(set(step.rows)) == len(step.rows) == len(step.num_scheduled_tokens) == len(step.samples) > 0
        assert step.total_num_scheduled_tokens == sum(step.num_scheduled_tokens)
        counts = step.num_scheduled_tokens
        assert counts == [1] * counts.count(1) + [c for c in counts if c != 1], "one-token rows do not come first"
        # In each layer all keys and values are written before any are read. A failing row writes nothing.
        for row_index, count in zip(step.rows, counts, strict=True):
            self._write(self.rows[row_index], count)
        errors: dict[int, str] = {}
        sampled: list[list[int]] = []
        logprobs: dict[int, list[TokenLogprobs]] = {}
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        for index, (row_index, count, samples) in enumerate(zip(step.rows, counts, step.samples, strict=True)):
            row = self.rows[row_index]
            if row.request_id in self.fail_request_ids:
                errors[index] = "told to fail"
                sampled.append([])
                continue
            is_damaged = not self._reads_are_right(row, count)
            assert not is_damaged or self.tolerates_damage, (
                f"request {row.request_id} read something that is not its own"
            )
            if is_damaged:
                self._spoil(row, count)
            start, row.num_computed_tokens = row.num_computed_tokens, row.num_computed_tokens + count
            assert samples == (row.num_computed_tokens == len(row.token_ids) and row.params.max_tokens != 0)
            if row.params.prompt_logprobs is not None:
                positions = range(max(1, start + 1), min(row.num_computed_tokens + 1, row.num_prompt_tokens))
                prompt_logprobs[index] = [TokenLogprobs([row.token_ids[p]], [-float(p)], 1) for p in positions]
            tokens = []
            if samples:
                num_out = len(row.token_ids) - row.num_prompt_tokens
                masked = row.stops if num_out < row.params.min_tokens else set()
                tokens = [GARBAGE if is_damaged else sample(row.hidden[-1], row.params, masked)]
                row.token_ids += tokens
                if row.params.logprobs is not None:
                    logprobs[index] = [TokenLogprobs([t], [-1.0], 1) for t in tokens]
            sampled.append(tokens)
        return ModelRunnerOutput(step.step_id, sampled, logprobs or None, prompt_logprobs or None, errors or None)

    def _write(self, row: _Row, count: int) -> None:
        if row.request_id in self.fail_request_ids:
            return
        while len(row.hidden) < len(row.token_ids):
            row.hidden.append(extend(row.hidden[-1] if row.hidden else row.encoded, row.token_ids[len(row.hidden)]))
        start = row.num_computed_tokens
        assert start + count <= len(row.token_ids), "a token is scheduled that the row does not have"
        self.num_prompt_tokens_computed += max(0, min(start + count, row.num_prompt_tokens) - start)
        for group in self.growing:
            spec, table = self.kv.groups[group].spec, row.tables[group]
            for position in range(start, start + count):
                block = table[position // spec.block_size]
                assert 0 < block < self.kv.num_blocks, f"block {block} is written"
                self._forget_other_groups(group, block)
                self.slots[group][block, position % spec.block_size] = row.hidden[position]

    def _encode(self, row: _Row) -> None:
        for group in self.cross:
            size = self.kv.groups[group].spec.block_size
            for position in range(row.num_encoder_positions):
                block = row.tables[group][position // size]
                self._forget_other_groups(group, block)
                self.slots[group][block, position % size] = row.encoded + position
        self.num_encoded += row.num_encoder_positions

    def _forget_other_groups(self, group: int, block: int) -> None:
        # A block's bytes are one group's at a time: writing through one group destroys what another had there.
        for other, slots in enumerate(self.slots):
            if other != group:
                size = self.kv.groups[other].spec.block_size
                for offset in range(size):
                    slots.pop((block, offset), None)

    def _spoil(self, row: _Row, count: int) -> None:
        # What a row writes depends on what it read in the layers before.
        for group in self.growing:
            size, table = self.kv.groups[group].spec.block_size, row.tables[group]
            for position in range(row.num_computed_tokens, row.num_computed_tokens + count):
                self.slots[group].pop((table[position // size], position % size), None)

    def _reads_are_right(self, row: _Row, count: int) -> bool:
        first_query = row.num_computed_tokens
        for group in self.cross:
            size, table = self.kv.groups[group].spec.block_size, row.tables[group]
            for i in range(row.num_encoder_positions):
                if self.slots[group].get((table[i // size], i % size)) != row.encoded + i:
                    return False
        for group in self.growing:
            spec, table = self.kv.groups[group].spec, row.tables[group]
            first = 0
            if isinstance(spec, SlidingWindowSpec):
                first = max(0, first_query - spec.window + 1)
            for position in range(first, first_query + count):
                block = table[position // spec.block_size]
                assert block != NULL_BLOCK, f"position {position} of {row.request_id} is read from the null block"
                if self.slots[group].get((block, position % spec.block_size)) != row.hidden[position]:
                    return False
        return True


def full_spec(block_size: int = 4) -> FullAttentionSpec:
    return FullAttentionSpec(1, 8, "float32", block_size)


def sliding_spec(window: int, block_size: int = 4) -> SlidingWindowSpec:
    return SlidingWindowSpec(1, 8, "float32", block_size, window)


def cross_spec(block_size: int = 4) -> CrossAttentionSpec:
    return CrossAttentionSpec(1, 8, "float32", block_size)


def kv_config(num_blocks: int, *specs: FullAttentionSpec | SlidingWindowSpec) -> KVCacheConfig:
    """A pool for one group a spec; a single full group of block size 4 by default."""
    groups = [KVGroup([f"layer.{i}"], spec) for i, spec in enumerate(specs or (full_spec(),))]
    return KVCacheConfig(num_blocks, groups)


def make_request(request_id: str, prompt: list[int], **options: object) -> EngineRequest:
    """A request; keyword arguments of EngineRequest go there, all others to SamplingParams."""
    own = {
        name: options.pop(name)
        for name in ("priority", "cache_salt", "output_token_ids", "arrival_time", "is_admitted", "encoder_input")
        if name in options
    }
    eos = options.pop("eos_token_ids", [EOS])
    options.setdefault("max_tokens", 8)
    options.setdefault("seed", 1)
    params = SamplingParams(**options)  # type: ignore[arg-type]
    return EngineRequest(request_id, list(prompt), params, eos_token_ids=eos, **own)  # type: ignore[arg-type]


class Engine:
    """Scheduler and fake worker in the loop of the engine core, with `depth` steps in flight."""

    def __init__(
        self,
        kv: KVCacheConfig | None = None,
        *,
        depth: int = 1,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 128,
        enable_prefix_caching: bool = True,
        check: bool = True,
        **scheduler_options: object,
    ):
        self.kv = kv or kv_config(200)
        config = SchedulerConfig(max_num_seqs, max_num_batched_tokens, max_model_len, **scheduler_options)  # type: ignore
        block_size = self.kv.groups[0].spec.block_size
        cache = CacheConfig(block_size, "float32", 0.5, enable_prefix_caching=enable_prefix_caching)
        self.scheduler = Scheduler(config, cache, self.kv)
        self.worker = FakeWorker(self.kv)
        self.depth, self.budget = depth, max_num_batched_tokens
        self.check = check
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.steps: list[SchedulerOutput] = []
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, EngineOutput] = {}
        self.outputs: list[EngineOutput] = []

    def add(self, *requests: EngineRequest) -> None:
        for request in requests:
            self.scheduler.add_request(request)
            self.worker.encoded[request.request_id] = encoded(request)
            self.tokens[request.request_id] = list(request.output_token_ids)

    def abort(self, *request_ids: str) -> list[EngineOutput]:
        outputs = self.scheduler.abort(request_ids)
        self._collect(outputs)
        if self.check:
            self.scheduler.check_invariants()
        return outputs

    def step(self) -> list[EngineOutput]:
        """One round of the core's loop; returns the outputs of the step that was settled."""
        while len(self.in_flight) < self.depth and (step := self.scheduler.schedule()) is not None:
            self.steps.append(step)
            num_to_encode = sum(
                new.encoder_input.num_positions for new in step.new_rows if new.encoder_input is not None
            )
            assert step.total_num_scheduled_tokens + num_to_encode <= self.budget, "more than the budget"
            self.in_flight.append((step, self.worker.execute(step)))
            if self.check:
                self.scheduler.check_invariants()
        if not self.in_flight:
            assert not self.scheduler.has_unfinished(), "unfinished requests, but nothing is scheduled"
            return []
        outputs = self.scheduler.update(*self.in_flight.popleft())
        self._collect(outputs)
        if self.check:
            self.scheduler.check_invariants()
        return outputs

    def run(self, max_steps: int = 10_000) -> "Engine":
        """Step until everything is finished and settled."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished() and not self.in_flight:
                self.scheduler.check_idle()
                return self
            self.step()
        raise AssertionError(f"not finished after {max_steps} steps")

    def _collect(self, outputs: list[EngineOutput]) -> None:
        self.outputs += outputs
        for output in outputs:
            assert output.request_id not in self.finished, "an output after the last one"
            self.tokens[output.request_id] += output.new_token_ids
            if output.logprobs is not None:
                assert [entry.token_ids[0] for entry in output.logprobs] == output.new_token_ids
            if output.finish_reason is not None:
                self.finished[output.request_id] = output

    def check_answer(self, request: EngineRequest) -> None:
        """The answer is that of a solo run."""
        tokens, reason = solo_run(request, self.scheduler.max_total_tokens)
        assert self.tokens[request.request_id] == tokens
        assert self.finished[request.request_id].finish_reason == reason
