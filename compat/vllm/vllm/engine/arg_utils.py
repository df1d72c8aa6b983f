"""`EngineArgs` that take vLLM's options."""

import argparse
from typing import Any

import octavo.config.args
from octavo.config.options import option_fields
from octavo.config.parser import add_option_flags
from vllm._options import translate


class EngineArgs(octavo.config.args.EngineArgs):
    """Octavo's engine options; what vLLM knows besides is dropped where it changes nothing, else refused by name."""

    def __init__(self, **options: Any):
        vars(self).update(vars(octavo.config.args.EngineArgs.from_kwargs(**translate(options))))

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each option, with its default."""
        add_option_flags(parser, octavo.config.args.EngineArgs)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        """The options among parsed flags; others are left alone."""
        known = [field.name for field in option_fields(octavo.config.args.EngineArgs)]
        return cls(**{name: getattr(args, name) for name in known if hasattr(args, name)})


AsyncEngineArgs = EngineArgs
