"""The two roots of every error Octavo raises on purpose.

A `ClientError` is the caller's mistake: it becomes a 4xx over HTTP and a `ValueError` in Python. A `ServerError` is ours.
"""


class OctavoError(Exception):
    """Anything Octavo raises on purpose."""


class ClientError(OctavoError, ValueError):
    """The request cannot be served as asked; `param` names the field to change.

    The message says what was asked, what is possible and what to change.
    """

    status = 400
    code = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class ContextLengthError(ClientError):
    """The prompt, or prompt plus answer, does not fit the model's context."""

    code = "context_length_exceeded"


class ModelNotFoundError(ClientError):
    """The request names a model or adapter that is not served."""

    status = 404
    code = "model_not_found"


class QueueFullError(ClientError):
    """Too much is waiting; the client may retry later."""

    status = 429
    code = "queue_full"


class ConflictError(ClientError):
    """What was asked contradicts what the engine is doing right now."""

    status = 409
    code = "conflict"


class ConfigError(ClientError):
    """An engine option, or a combination of them, cannot be honoured."""


class ServerError(OctavoError, RuntimeError):
    """Something failed on our side."""


class LoadError(ServerError):
    """A checkpoint is missing, damaged or does not fit its model."""


class RequestFailedError(ServerError):
    """One request failed inside the engine; the others go on."""


class EngineDeadError(ServerError):
    """The engine core is gone and could not be brought back."""


class EngineAsleepError(ServerError):
    """The engine sleeps: it takes no requests until somebody wakes it."""


class EngineRestartingError(EngineDeadError):
    """The engine core is gone and is being brought back; open requests go on once it is."""
