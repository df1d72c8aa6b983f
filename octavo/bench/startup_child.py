"""The process that `octavo bench startup` measures: engine options in on stdin, time stamps out on stdout, both JSON.

Stamps are `time.monotonic()`, which all processes of a machine share.
"""

import time

ENTERED = time.monotonic()  # before anything else is imported

import json  # noqa: E402
import sys  # noqa: E402


def main() -> None:
    """Import, start an engine, make one token."""
    options = json.load(sys.stdin)
    from octavo.config.args import EngineArgs
    from octavo.llm import LLM
    from octavo.types.prompts import TokensPrompt
    from octavo.types.sampling_params import SamplingParams

    imported = time.monotonic()
    with LLM.from_engine_args(EngineArgs(**options)) as llm:
        started = time.monotonic()
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        llm.generate([TokensPrompt(prompt_token_ids=list(range(1, 17)))], params, use_tqdm=False)
        answered = time.monotonic()
        phases = llm.llm_engine.report.seconds
    stamps = {"entered": ENTERED, "imported": imported, "started": started, "answered": answered}
    json.dump({"stamps": stamps, "engine": phases}, sys.stdout)


if __name__ == "__main__":
    main()
