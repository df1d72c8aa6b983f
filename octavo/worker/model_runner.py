"""`ModelRunner`: one forward pass a step.

    apply differences → inputs from rows → model → logits → sample → tokens back into the rows

Everything after the first arrow runs on the device without waiting for it; `StepHandle.result()` is the only place that
does. A step in which rows follow a grammar stops before it samples, and goes on when `sample` brings its masks.

What does not belong here: scheduling decisions, weight formats, platform questions, features few requests use
(`prompt_logprobs.py`, `logits_processors.py` show how those attach).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from octavo.context import StepContext, set_step_context
from octavo.layers.causal_lm import CausalLM
from octavo.layers.encoder_decoder import EncoderDecoder
from octavo.ops.inputs import store_sampled
from octavo.types.step import ModelRunnerOutput, SchedulerOutput, TokenMasks
from octavo.worker.encoder_runner import EncoderRunner
from octavo.worker.graphs import DecodeGraphs, DecodeOutput
from octavo.worker.input_batch import InputBatch
from octavo.worker.input_embeds import InputEmbeds
from octavo.worker.prompt_logprobs import PromptLogprobs, PromptScores
from octavo.worker.rows import Rows, upload
from octavo.worker.sampler import Sampler, SamplerOutput

if TYPE_CHECKING:
    from octavo.worker.cpu_programs import CpuPrograms


class StepHandle:
    """A step on its way. `result()` waits for the device and gives plain data."""

    def __init__(self, step: SchedulerOutput):
        self.step = step
        self._finish: Callable[[], ModelRunnerOutput] | None = None  # None: it has not sampled yet
        self._event: torch.cuda.Event | None = None

    def launched(self, finish: Callable[[], ModelRunnerOutput], event: torch.cuda.Event | None) -> None:
        """All of the step is on its way: `finish` gives its result once `event` has come."""
        self._finish, self._event = finish, event

    def done(self) -> bool:
        """Whether `result()` would return at once."""
        return self._finish is not None and (self._event is None or self._event.query())

    def result(self) -> ModelRunnerOutput:
        """The step's tokens; blocks until the device has them."""
        assert self._finish is not None, f"step {self.step.step_id} awaits its masks"
        if self._event is not None:
            self._event.synchronize()
        return self._finish()


@dataclass(slots=True)
class _Forward:
    """A step after its forward pass."""

    logits: torch.Tensor | None  # [n, vocab] of the n rows that sample; None: no row does
    rows_cpu: list[int]  # those rows
    rows: torch.Tensor  # the same on the device
    seq_lens: torch.Tensor  # [n] int32: index of the token to be sampled
    plain: SamplerOutput | None = None  # what a graph has sampled already, if that is all the rows ask for
    prompt: PromptScores | None = None


class ModelRunner:
    """Owns the rows, the step buffers, the graphs and the sampler of one device."""

    def __init__(
        self,
        model: CausalLM,
        rows: Rows,
        batch: InputBatch,
        sampler: Sampler,
        graphs: "DecodeGraphs | CpuPrograms | None",
        dtype: torch.dtype,
        embeds_width: int | None = None,
    ):
        """`dtype`: the model's. `embeds_width`: of the embeddings that requests may bring; None: they bring none."""
        self.model = model
        self.rows = rows
        self.batch = batch
        self.sampler = sampler
        self.graphs = graphs
        # A faster way than the model's own code to run steps that are not decode steps, where the platform has one.
        self.forward_mixed: Callable[[StepContext], torch.Tensor] | None = None
        self.prompt_logprobs = PromptLogprobs(model, rows)
        self.encoder = EncoderRunner(model, rows, rows.max_encoder_len) if isinstance(model, EncoderDecoder) else None
        self.input_embeds = InputEmbeds(model, dtype, rows.device)
        self.embeds_width = embeds_width
        self.device = rows.device
        self._awaiting: tuple[StepHandle, _Forward] | None = None  # the step that waits for its masks
        self._uploads = torch.cuda.Stream() if rows.device.type == "cuda" else None  # for masks

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> StepHandle:
        """Launch one step, or as much of it as needs no masks. Returns without waiting for the device."""
        self._awaiting = None
        self._apply_differences(step)
        handle = StepHandle(step)
        num = len(step.rows)
        if num == 0:
            handle.launched(lambda: ModelRunnerOutput(step.step_id, []), None)
            return handle
        is_decode = step.total_num_scheduled_tokens == num and all(step.samples)
        is_decode = is_decode and not self.input_embeds.concerns(step.rows)
        if is_decode and self.graphs is not None and num <= self.graphs.max_size:
            forward = self._decode_by_graph(step.rows, not step.awaits_masks and self.sampler.is_plain(step.rows))
        else:
            forward = self._mixed(step)
        if step.awaits_masks:
            self._awaiting = handle, forward
            return handle
        return self._hand_over(handle, forward, self._sample(forward))

    @torch.inference_mode()
    def sample(self, masks: TokenMasks) -> None:
        """Launch what is left of the step that awaits these."""
        assert self._awaiting is not None and self._awaiting[0].step.step_id == masks.step_id
        (handle, forward), self._awaiting = self._awaiting, None
        self._hand_over(handle, forward, self._sample(forward, self._upload(masks, handle.step.samples)))

    def _upload(self, masks: TokenMasks, samples: list[bool]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(bitmask [n, words], indices [n] of its rows in the logits) on the device; None when no row is masked."""
        if not masks.indices:
            return None
        words = np.frombuffer(masks.words, dtype=np.int32).reshape(len(masks.indices), -1).copy()
        indices = (np.cumsum(samples) - 1)[masks.indices].astype(np.int32)
        if self._uploads is None:
            return upload(words, self.device), upload(indices, self.device)
        # Beside the forward pass that is still running, not behind it.
        with torch.cuda.stream(self._uploads):
            sent = upload(words, self.device), upload(indices, self.device)
        torch.cuda.current_stream().wait_stream(self._uploads)
        for tensor in sent:
            tensor.record_stream(torch.cuda.current_stream())
        return sent

    def _apply_differences(self, step: SchedulerOutput) -> None:
        for row in step.freed_rows:
            self.sampler.remove_row(row)
            self.prompt_logprobs.remove_row(row)
            self.input_embeds.remove_row(row)
        if step.new_rows:
            self.rows.fill(step.new_rows)
        for new in step.new_rows:
            self.sampler.add_row(new.row, new)
            self.prompt_logprobs.add_row(new.row, new.sampling_params)
            self.input_embeds.add_row(new)
        if step.new_blocks:
            self.rows.add_blocks(step.new_blocks)
        if self.encoder is not None:
            self.encoder.run(step.new_rows)

    def _decode_by_graph(self, rows: list[int], is_plain: bool) -> _Forward:
        """`is_plain`: what the graph samples is what the rows ask for."""
        assert self.graphs is not None
        size = self.graphs.size_for(len(rows))
        self.batch.prepare_decode_rows(rows, size)
        self.sampler.flush()
        logits, token_ids, is_bad = self.graphs.replay(size, wants_tokens=is_plain)
        num = len(rows)
        plain = SamplerOutput(token_ids[:num], is_bad[:num]) if is_plain else None
        return _Forward(logits[:num], rows, self.batch.decode_rows[:num], self.batch.seq_lens[:num], plain)

    def decode_step(self, num: int, all_greedy: bool = False) -> DecodeOutput:
        """One token for each of the first `num` of `batch.decode_rows`: what a graph captures."""
        context = self.batch.gather_decode(num, self.rows.max_len)
        logits = self.model.logits(self.forward(context))
        return self.sample_decoded(logits, num, all_greedy)

    def sample_decoded(self, logits: torch.Tensor, num: int, all_greedy: bool = False) -> DecodeOutput:
        """The end of a decode step: choose a token for each row of logits and store it."""
        rows, seq_lens = self.batch.decode_rows[:num], self.batch.seq_lens[:num]
        token_ids, is_bad = self.sampler.sample_plain(logits, rows, seq_lens, all_greedy)
        store_sampled(token_ids, rows, seq_lens, self.rows.token_ids)
        return DecodeOutput(logits, token_ids, is_bad)

    def _mixed(self, step: SchedulerOutput) -> _Forward:
        sampling = [i for i, wanted in enumerate(step.samples) if wanted]
        context = self.batch.prepare_mixed(step.rows, step.num_scheduled_tokens, sampling)
        index = self.batch.logits_index
        if sampling and not self.prompt_logprobs.wanted:
            context.output_rows = index
        embeds = self.input_embeds.collect(step, self.batch.input_ids, context)
        if embeds is None:
            hidden_states = (self.forward_mixed or self.forward)(context)
        else:
            hidden_states = self.forward(context, embeds)
        prompt = self.prompt_logprobs.collect(step, hidden_states, context)
        rows = [step.rows[i] for i in sampling]
        if not sampling:
            return _Forward(None, rows, self.batch.sampling_rows, context.seq_lens[:0], prompt=prompt)
        # A model that knows of output_rows has left the others out already.
        kept = len(hidden_states) == len(sampling)
        logits = self.model.logits(hidden_states if kept else hidden_states[index])
        seq_lens = (self.batch.positions[index] + 1).to(torch.int32)
        return _Forward(logits, rows, self.batch.sampling_rows, seq_lens, prompt=prompt)

    def forward(self, context: StepContext, inputs_embeds: torch.Tensor | None = None) -> torch.Tensor:
        """The hidden states of a step whose inputs are prepared; `inputs_embeds` take the place of its tokens."""
        input_ids, positions = self.batch.input_ids[: context.num_tokens], self.batch.positions[: context.num_tokens]
        with set_step_context(context):
            if inputs_embeds is None:
                return self.model(input_ids, positions)
            return self.model(input_ids, positions, inputs_embeds)

    def _sample(
        self, forward: _Forward, masks: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> SamplerOutput | None:
        logits, rows, seq_lens = forward.logits, forward.rows, forward.seq_lens
        if logits is None:
            return None
        if forward.plain is not None:
            return forward.plain
        # A graph may have sampled and stored tokens without the rows' extras: these take their place.
        state = self.rows
        out = self.sampler.sample(
            logits, forward.rows_cpu, rows, seq_lens, state.token_ids, state.num_prompt, *(masks or ())
        )
        store_sampled(out.token_ids, rows, seq_lens, state.token_ids)
        return out

    def _hand_over(self, handle: StepHandle, forward: _Forward, sampled: SamplerOutput | None) -> StepHandle:
        """Start the copy to the host; what is left for `result()` is turning it into lists."""
        step, prompt = handle.step, forward.prompt
        host = None if sampled is None else sampled.to_host()
        prompt_host = None if prompt is None else prompt.to_host()
        event = None
        if self.device.type != "cpu":
            event = torch.cuda.Event()
            event.record()

        def finish() -> ModelRunnerOutput:
            output = ModelRunnerOutput(step.step_id, [[] for _ in step.rows])
            if host is not None:
                host.fill(output, step.samples)
            if prompt_host is not None:
                output.prompt_logprobs = prompt_host.entries()
            return output

        handle.launched(finish, event)
        return handle

    @torch.inference_mode()
    def dummy_step(self, num_tokens: int, num_requests: int) -> None:
        """Run the forward pass and the sampler on `num_tokens` made-up tokens of `num_requests` requests.

        The same path as a real step, but nothing is written to a cache block or a row: for measuring memory and warming up.
        """
        if self.encoder is not None:
            self.encoder.run_dummy(num_tokens)
        scratch = [self.rows.scratch] * num_requests
        context = self.batch.prepare_dummy(num_tokens, num_requests)
        embeds = None
        if self.embeds_width is not None:
            embeds = self.input_embeds.worst_case(self.batch.input_ids[:num_tokens], self.embeds_width)
        logits = self.model.logits(self.forward(context, embeds)[self.batch.logits_index])
        self.sampler.sample(
            logits, scratch, self.batch.sampling_rows, context.seq_lens, self.rows.token_ids, self.rows.num_prompt
        )
