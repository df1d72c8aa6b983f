"""`octavo run-batch`: answer a file of requests in OpenAI's batch format."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from octavo.config.args import EngineArgs
from octavo.config.options import check_options, option, option_fields
from octavo.config.parser import OptionParser
from octavo.config.server_args import ACCESS, LISTENING, ServerArgs
from octavo.errors import ConfigError

_GROUP = "Batch"
FETCH_SECONDS = 60.0  # without a byte of the input


@dataclass(kw_only=True)
class BatchArgs:
    """Options of the batch itself."""

    input_file: str = option(
        "", "File of requests, one JSON object a line, or its http(s) URL.", group=_GROUP, short="-i"
    )
    output_file: str = option("", "File to write the answers to, one JSON object a line.", group=_GROUP, short="-o")
    max_concurrency: int = option(256, "Most requests in flight.", group=_GROUP, low=1, high=16384)
    output_order: str = option(
        "input",
        "Whether answers are written in the order of the requests (input) or as they are complete (completion).",
        group=_GROUP,
        choices=("input", "completion"),
    )

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("input_file", "output_file"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is required: octavo run-batch -i FILE -o FILE --model MODEL.", param=name)
        if "://" in self.output_file:
            raise ConfigError("output_file must be a local file; upload it afterwards.", param="output_file")
        if Path(self.output_file).resolve() == Path(self.input_file).resolve():
            raise ConfigError("output_file is the input_file; choose another one.", param="output_file")


def parse(arguments: Sequence[str]) -> tuple[EngineArgs, ServerArgs, BatchArgs]:
    """The options from a command line; those of a server that listens are not among them."""
    classes = (BatchArgs, EngineArgs, ServerArgs)
    parser = OptionParser(
        "octavo run-batch", "Answer a file of requests.", classes, positional="model", skip_groups=(LISTENING, ACCESS)
    )
    given = parser.parse_options(arguments)
    of_class = [{field.name for field in option_fields(cls)} for cls in classes]
    batch, engine, server = ({name: value for name, value in given.items() if name in names} for names in of_class)
    return EngineArgs(**engine), ServerArgs(**server, disable_uvicorn_access_log=True), BatchArgs(**batch)


def run(arguments: Sequence[str]) -> int:
    """Run the file; 1 when the engine died on the way. Lines that fail are told in the output."""
    engine_args, server_args, args = parse(arguments)
    with _open_lines(args.input_file) as lines, _open_output(args.output_file) as output:
        from octavo.engine.async_llm import AsyncLLM
        from octavo.logger import get_logger
        from octavo.metrics import StatLine
        from octavo.server.app import build_app
        from octavo.server.batch import BatchRunner
        from octavo.server.keys import api_keys

        engine = AsyncLLM.from_engine_args(engine_args)
        try:
            if not engine.config.observability.disable_log_stats:
                engine.stat_loggers.append(StatLine())
            runner = BatchRunner(
                build_app(engine, server_args),
                output.write,
                max_concurrency=args.max_concurrency,
                keeps_order=args.output_order == "input",
                key=next(iter(api_keys(server_args)), None),
            )
            counts = asyncio.run(runner.run(lines))
        finally:
            engine.shutdown()
    get_logger(__name__).info("%d requests answered, %d failed", counts.num_answered, counts.num_failed)
    return 1 if engine.errored else 0


@contextmanager
def _open_lines(source: str) -> Iterator[Iterable[bytes]]:
    """The lines of a local file or of a public web address."""
    if "://" in source:
        from octavo.utils.public_url import open_public_url

        with open_public_url(source, FETCH_SECONDS) as response:
            yield response
        return
    try:
        file = open(source, "rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}.", param="input_file") from None
    with file:
        yield file


def _open_output(path: str) -> BinaryIO:
    try:
        return open(path, "wb")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.", param="output_file") from None
