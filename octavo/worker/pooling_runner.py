"""`PoolingRunner`: what `ModelRunner` is to models that make text. No logits, no sampler, no graphs."""

from typing import Any

import torch

from octavo.config.engine import PoolingConfig
from octavo.context import StepContext, set_step_context
from octavo.types.step import ModelRunnerOutput, SchedulerOutput, TokenMasks
from octavo.worker.input_batch import InputBatch
from octavo.worker.model_runner import StepHandle
from octavo.worker.pooling import Pooler
from octavo.worker.rows import Rows, upload


class PoolingRunner:
    """Owns the rows and the step buffers of one device."""

    graphs = None
    forward_mixed = None

    def __init__(self, model: Any, config: PoolingConfig, rows: Rows, batch: InputBatch):
        self.model = model
        self.rows = rows
        self.batch = batch
        self.pooler = Pooler(model, config, rows)
        self.device = rows.device

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> StepHandle:
        """Launch one step. Returns without waiting for the device."""
        for row in step.freed_rows:
            self.pooler.remove_row(row)
        if step.new_rows:
            self.rows.fill(step.new_rows)
        for new in step.new_rows:
            self.pooler.add_row(new)
        if step.new_blocks:
            self.rows.add_blocks(step.new_blocks)
        handle = StepHandle(step)
        if not step.rows:
            handle.launched(lambda: ModelRunnerOutput(step.step_id, []), None)
            return handle
        context = self.batch.prepare_mixed(step.rows, step.num_scheduled_tokens, [])
        if self.model.has_token_types:
            types = self.pooler.token_types(step)
            context.token_types = None if types is None else upload(types, self.device)
        pooled = self.pooler.collect(step, self.forward(context), context).to_host()
        event = None
        if self.device.type != "cpu":
            event = torch.cuda.Event()
            event.record()

        def finish() -> ModelRunnerOutput:
            output = ModelRunnerOutput(step.step_id, [[] for _ in step.rows])
            pooled.fill(output)
            return output

        handle.launched(finish, event)
        return handle

    def sample(self, masks: TokenMasks) -> None:
        """No request here follows a grammar."""
        raise AssertionError("a pooling step awaits no masks")

    def forward(self, context: StepContext) -> torch.Tensor:
        """The hidden states [tokens, hidden] of a step whose inputs are prepared, behind the last norm."""
        batch = self.batch
        with set_step_context(context):
            hidden_states = self.model(batch.input_ids[: context.num_tokens], batch.positions[: context.num_tokens])
            return self.model.final_norm(hidden_states)

    @torch.inference_mode()
    def dummy_step(self, num_tokens: int, num_requests: int) -> None:
        """Run the forward pass on made-up tokens, for measuring memory and warming up; nothing is written to a row."""
        num_requests = max(num_requests, -(-num_tokens // self.rows.max_len))  # an encoder's positions end there
        self.forward(self.batch.prepare_dummy(num_tokens, num_requests))
