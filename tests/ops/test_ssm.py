"""Recurrent operators: a step of many tokens, of requests that begin, go on and have one token, equals steps of one token."""

import pytest
import torch

from octavo.ops.ssm.conv import short_conv
from octavo.ops.ssm.delta import gated_delta_rule
from octavo.ops.ssm.mamba import selective_scan, state_space_dual
from octavo.ops.ssm.requests import Requests
from octavo.ops.ssm.wkv import wkv

OPS = (short_conv, selective_scan, state_space_dual, gated_delta_rule, wkv)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_one_step_of_many_tokens_equals_steps_of_one(op):
    for arguments in op.inputs(torch.Generator().manual_seed(0), torch.float32, "cpu"):
        place = next(i for i, a in enumerate(arguments) if isinstance(a, Requests))
        requests, states = arguments[place], arguments[place - 1]
        num_tokens, by_step = int(requests.query_start_loc[-1]), states.clone()
        got = op.reference(*arguments)
        want = torch.empty_like(got)
        for r, (start, end) in enumerate(requests.query_start_loc.unfold(0, 2, 1).tolist()):
            for t in range(start, end):
                seq_len = requests.seq_lens[r : r + 1] - (end - t - 1)
                one = Requests(requests.rows[r : r + 1], torch.tensor([0, 1], dtype=torch.int32), seq_len, 1)
                own = [
                    a[t : t + 1] if isinstance(a, torch.Tensor) and len(a) == num_tokens else a
                    for a in arguments[: place - 1]
                ]
                want[t] = op.reference(*own, by_step, one, *arguments[place + 1 :])[0]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(states, by_step, rtol=1e-4, atol=1e-4)
