"""A logits processor of one's own: requests may ask for answers without some letters.

    python examples/logits_processor.py [MODEL]

On a server: `octavo serve MODEL --logits-processors logits_processor:WithoutLetters`, started where this file can be
imported, and `"vllm_xargs": {"without": "e"}` in a request.
"""

import sys

import torch

from octavo import LLM, AdapterLogitsProcessor, SamplingParams
from octavo.tokenizer import get_tokenizer


class WithoutLetters(AdapterLogitsProcessor):
    """`extra_args={"without": "aeiou"}`: no token with one of these letters."""

    @classmethod
    def validate_params(cls, sampling_params):
        without = (sampling_params.extra_args or {}).get("without", "")
        if not isinstance(without, str):
            raise ValueError(f"without={without!r} must be a string of letters.")

    def __init__(self, config, device, is_pin_memory):
        super().__init__(config, device, is_pin_memory)
        tokenizer = get_tokenizer(config.tokenizer)
        self.texts = [tokenizer.token_text(token_id) for token_id in range(len(tokenizer))]
        self.vocab_size = config.model.vocab_size
        self.device = device

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        letters = (params.extra_args or {}).get("without")
        if not letters:
            return None
        forbidden = torch.zeros(self.vocab_size, dtype=torch.bool)
        for token_id, text in enumerate(self.texts[: self.vocab_size]):
            forbidden[token_id] = any(letter in text.lower() for letter in letters)
        forbidden = forbidden.to(self.device)
        return lambda output_ids, logits: logits.masked_fill(forbidden, -torch.inf)


def main(model: str = "smollm2") -> None:
    with LLM(model, logits_processors=[WithoutLetters]) as llm:
        for without in ("", "e", "aeiou"):
            params = SamplingParams(temperature=0, max_tokens=16, extra_args={"without": without})
            [output] = llm.generate("The weather today is", params, use_tqdm=False)
            print(f"without {without!r}: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
