"""What routes share: made once by `build_app`, found at `request.app.context`."""

import time
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from octavo.config.engine import ModelConfig
from octavo.config.server_args import ServerArgs
from octavo.errors import ClientError
from octavo.server.activity import Activity
from octavo.server.engine_client import EngineClient
from octavo.server.output_formats import OutputFormats
from octavo.server.prompts import PromptMaker
from octavo.server.responses.store import ResponseStore
from octavo.tokenizer.tokenizer import Tokenizer


@dataclass
class ServerContext:
    engine: EngineClient
    args: ServerArgs
    prompts: PromptMaker
    formats: OutputFormats
    registry: CollectorRegistry
    responses: ResponseStore
    activity: Activity = field(default_factory=Activity)
    started: int = field(default_factory=lambda: int(time.time()))  # "created" of the model cards

    @property
    def max_body_bytes(self) -> int:
        return self.args.max_body_bytes

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The engine's tokenizer, if it has one."""
        try:
            return self.engine.tokenizer
        except ClientError:
            return None

    @property
    def model(self) -> ModelConfig:
        return self.engine.config.model
