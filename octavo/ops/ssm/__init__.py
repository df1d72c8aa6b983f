"""Operators of recurrent layers. All go on from the states that they find in the requests' rows, and leave theirs there.

    short_conv         a convolution over a few tokens, each channel by itself
    selective_scan     Mamba: a decay for every channel and state element
    state_space_dual   Mamba 2: a decay for every head, so that chunks of tokens are matrix products
    gated_delta_rule   Qwen3-Next: a state of key → value associations, each corrected before it is written
    wkv                RWKV-4: means of values, weighted by keys and by distance
    gated_norm         the RMSNorm and gate that follow them

Batches are ragged as for attention (`Requests`): prompts, their chunks and single tokens in any mix. A step's tokens are
computed chunk by chunk (`scan_chunks`) with the state carried between; a decode step is one chunk of one token.
"""
