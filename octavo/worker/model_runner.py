"""`ModelRunner`: one forward pass a step.

    apply differences → inputs from rows → model → logits → sample → tokens back into the rows

Everything after the first arrow runs on the device without waiting for it; `StepHandle.result()` is the only place that
does. What does not belong here: scheduling decisions, weight formats, platform questions, features few requests use
(`prompt_logprobs.py`, `logits_processors.py` show how those attach).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from octavo.context import StepContext, set_step_context
from octavo.layers.causal_lm import CausalLM
from octavo.ops.inputs import store_sampled
from octavo.types.step import ModelRunnerOutput, SchedulerOutput
from octavo.worker.graphs import DecodeGraphs, DecodeOutput
from octavo.worker.input_batch import InputBatch
from octavo.worker.prompt_logprobs import PromptLogprobs
from octavo.worker.rows import Rows
from octavo.worker.sampler import Sampler, SamplerOutput

if TYPE_CHECKING:
    from octavo.worker.cpu_programs import CpuPrograms


class StepHandle:
    """A step on its way. `result()` waits for the device and gives plain data."""

    def __init__(self, step: SchedulerOutput, finish: Callable[[], ModelRunnerOutput], event: torch.cuda.Event | None):
        self.step = step
        self._finish = finish
        self._event = event

    def done(self) -> bool:
        """Whether `result()` would return at once."""
        return self._event is None or self._event.query()

    def result(self) -> ModelRunnerOutput:
        """The step's tokens; blocks until the device has them."""
        if self._event is not None:
            self._event.synchronize()
        return self._finish()


class ModelRunner:
    """Owns the rows, the step buffers, the graphs and the sampler of one device."""

    def __init__(
        self,
        model: CausalLM,
        rows: Rows,
        batch: InputBatch,
        sampler: Sampler,
        graphs: "DecodeGraphs | CpuPrograms | None",
    ):
        self.model = model
        self.rows = rows
        self.batch = batch
        self.sampler = sampler
        self.graphs = graphs
        self.prompt_logprobs = PromptLogprobs(model, rows)
        self.device = rows.device

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> StepHandle:
        """Launch one step. Returns without waiting for the device."""
        self._apply_differences(step)
        num = len(step.rows)
        if num == 0:
            return StepHandle(step, lambda: ModelRunnerOutput(step.step_id, []), None)
        is_decode = step.total_num_scheduled_tokens == num and all(step.samples)
        if is_decode and self.graphs is not None and num <= self.graphs.max_size:
            sampled = self._decode_by_graph(step.rows)
            prompt = None
        else:
            sampled, prompt = self._mixed(step)
        return self._hand_over(step, sampled, prompt)

    def _apply_differences(self, step: SchedulerOutput) -> None:
        for row in step.freed_rows:
            self.sampler.remove_row(row)
            self.prompt_logprobs.remove_row(row)
        if step.new_rows:
            self.rows.fill(step.new_rows)
        for new in step.new_rows:
            self.sampler.add_row(new.row, new)
            self.prompt_logprobs.add_row(new.row, new.sampling_params)
        if step.new_blocks:
            self.rows.add_blocks(step.new_blocks)

    def _decode_by_graph(self, rows: list[int]) -> SamplerOutput:
        assert self.graphs is not None
        size = self.graphs.size_for(len(rows))
        self.batch.prepare_decode_rows(rows, size)
        self.sampler.flush()
        logits, token_ids, is_bad = self.graphs.replay(size)
        num = len(rows)
        if self.sampler.is_plain(rows):
            return SamplerOutput(token_ids[:num], is_bad[:num])
        # The graph has sampled without the rows' extras: do it again with them and overwrite.
        return self._sample(logits[:num], rows, self.batch.decode_rows[:num], self.batch.seq_lens[:num])

    def decode_step(self, num: int, all_greedy: bool = False) -> DecodeOutput:
        """One token for each of the first `num` of `batch.decode_rows`: what a graph captures."""
        context = self.batch.gather_decode(num, self.rows.max_len)
        logits = self.model.logits(self._forward(context))
        return self.sample_decoded(logits, num, all_greedy)

    def sample_decoded(self, logits: torch.Tensor, num: int, all_greedy: bool = False) -> DecodeOutput:
        """The end of a decode step: choose a token for each row of logits and store it."""
        rows, seq_lens = self.batch.decode_rows[:num], self.batch.seq_lens[:num]
        token_ids, is_bad = self.sampler.sample_plain(logits, rows, seq_lens, all_greedy)
        store_sampled(token_ids, rows, seq_lens, self.rows.token_ids)
        return DecodeOutput(logits, token_ids, is_bad)

    def _mixed(self, step: SchedulerOutput):
        sampling = [i for i, wanted in enumerate(step.samples) if wanted]
        context = self.batch.prepare_mixed(step.rows, step.num_scheduled_tokens, sampling)
        hidden_states = self._forward(context)
        prompt = self.prompt_logprobs.collect(step, hidden_states, context)
        if not sampling:
            return None, prompt
        logits = self.model.logits(hidden_states[self.batch.logits_index])
        seq_lens = (self.batch.positions[self.batch.logits_index] + 1).to(torch.int32)
        rows = [step.rows[i] for i in sampling]
        return self._sample(logits, rows, self.batch.sampling_rows, seq_lens), prompt

    def _forward(self, context: StepContext) -> torch.Tensor:
        batch = self.batch
        with set_step_context(context):
            return self.model(batch.input_ids[: context.num_tokens], batch.positions[: context.num_tokens])

    def _sample(
        self, logits: torch.Tensor, rows_cpu: list[int], rows: torch.Tensor, seq_lens: torch.Tensor
    ) -> SamplerOutput:
        state = self.rows
        out = self.sampler.sample(logits, rows_cpu, rows, seq_lens, state.token_ids, state.num_prompt)
        store_sampled(out.token_ids, rows, seq_lens, state.token_ids)
        return out

    def _hand_over(self, step: SchedulerOutput, sampled: SamplerOutput | None, prompt) -> StepHandle:
        """Start the copy to the host; what is left for `result()` is turning it into lists."""
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

        return StepHandle(step, finish, event)

    @torch.inference_mode()
    def dummy_step(self, num_tokens: int, num_requests: int) -> None:
        """Run the forward pass and the sampler on `num_tokens` made-up tokens of `num_requests` requests.

        The same path as a real step, but nothing is written to a cache block or a row: for measuring memory and warming up.
        """
        lens = [num_tokens // num_requests + (i < num_tokens % num_requests) for i in range(num_requests)]
        scratch = [self.rows.scratch] * num_requests
        context = self.batch.prepare_mixed(scratch, lens, list(range(num_requests)))
        # The scratch row reports length 0; attention must do a real chunk's work.
        context.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        context.seq_lens_cpu = lens
        context.max_seq_len = max(lens)
        self.rows.num_computed_np[self.rows.scratch] = 0
        logits = self.model.logits(self._forward(context)[self.batch.logits_index])
        self.sampler.sample(
            logits, scratch, self.batch.sampling_rows, context.seq_lens, self.rows.token_ids, self.rows.num_prompt
        )
