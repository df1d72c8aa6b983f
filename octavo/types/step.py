"""All that scheduler and worker say to each other: integers and sampling parameters, once a step.

The worker keeps one permanent *row* a running request. A request arrives in full once (`NewRow`), afterwards the scheduler
sends differences: blocks it got, rows that ended. Token ids sampled by the worker are already in the worker's rows, so they
never travel back to it.
"""

import msgspec

from octavo.types.outputs import Pooled, TokenLogprobs
from octavo.types.pooling_params import PoolingParams
from octavo.types.prompts import PromptEmbeds
from octavo.types.request import EncoderInput
from octavo.types.sampling_params import SamplingParams


class NewRow(msgspec.Struct, array_like=True):
    """Fill a row: a request that starts, or one that resumes after preemption (the worker need not know which)."""

    row: int
    request_id: str
    token_ids: list[int]  # prompt and, when resuming, everything generated so far
    num_prompt_tokens: int  # of the above, how many the client sent (penalties and logprobs tell them apart)
    num_computed_tokens: int  # found in the prefix cache
    sampling_params: SamplingParams
    stop_token_ids: list[int]  # EOS ids and stop_token_ids: masked while fewer than min_tokens are out
    block_ids: list[list[int]]  # for each KV group
    pooling_params: PoolingParams | None = None
    prompt_embeds: PromptEmbeds | None = None  # of a prompt given as embeddings
    num_encoder_positions: int = 0  # of an encoder-decoder model: what cross-attention reads
    encoder_input: EncoderInput | None = None  # None: its output is in the blocks already, or there is none


class NewBlocks(msgspec.Struct, array_like=True, gc=False):
    """Blocks appended to one row's table in one group, at index `start`."""

    row: int
    group: int
    start: int
    block_ids: list[int]


class SchedulerOutput(msgspec.Struct, array_like=True):
    """One step of work. `rows`, `num_scheduled_tokens`, `samples` run in parallel, in the order the step computes them.

    Decode rows (one token) come first, so that a mixed step is one run of decodes followed by prefill chunks.
    Freed rows are processed before new ones: a new request may take a row freed in the same step.
    In each layer the keys and values of all rows are written before any row reads: a row's table may hold blocks that
    another row of the same step fills (they have the prefix in common).
    A windowed group's blocks are taken back without a word once its row's window has passed them: the row's old table
    entries then lead to foreign numbers, of which nothing may count (0 × NaN is NaN).
    """

    step_id: int
    freed_rows: list[int]
    new_rows: list[NewRow]
    new_blocks: list[NewBlocks]
    rows: list[int]
    num_scheduled_tokens: list[int]
    samples: list[bool]  # whether the row's last scheduled token is its last known one, so that a new token is sampled
    total_num_scheduled_tokens: int
    # Some row follows a grammar: the worker runs the forward pass, and samples once it has the step's `TokenMasks`.
    awaits_masks: bool = False


class TokenMasks(msgspec.Struct, array_like=True, gc=False):
    """What the rows that follow a grammar may sample. Sent once for each step that awaits it, while that step runs.

    It can be made only when the tokens of all older steps are known, so a step that awaits masks is the last in flight.
    """

    step_id: int
    indices: list[int]  # in the step's rows; a row that is not named may sample anything
    words: (
        bytes  # [len(indices), ceil(vocab_size / 32)] int32: token t is allowed where bit t % 32 of word t // 32 is set
    )


class ModelRunnerOutput(msgspec.Struct, array_like=True):
    """The result of one step, in the order of `SchedulerOutput.rows`."""

    step_id: int
    sampled_token_ids: list[list[int]]  # empty where nothing was sampled; several where drafts were accepted
    logprobs: dict[int, list[TokenLogprobs]] | None = None  # index in the step -> one entry a sampled token
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None  # index in the step -> entries for this chunk
    errors: dict[int, str] | None = None  # index in the step -> why this row failed (its neighbours did not)
    pooled: dict[int, Pooled] | None = (
        None  # index in the step -> what a request whose prompt is complete was computed for
    )
