"""`OpenPooling`: a request that waits for a vector or for classes."""

import numpy as np

from octavo.engine.open_request import Choice, OpenRequest
from octavo.types.outputs import EngineOutput, Pooled
from octavo.types.pooling_outputs import PoolingOutput, PoolingRequestOutput


class OpenPooling(OpenRequest):
    """One choice, whose end brings the numbers."""

    _pooled: Pooled | None = None

    def append(self, choice: Choice, output: EngineOutput) -> bool:
        self._pooled = output.pooled
        return super().append(choice, output)

    def take(self) -> PoolingRequestOutput[PoolingOutput]:  # type: ignore[override]
        """The numbers, or an empty vector and why there are none."""
        self._news.clear()
        choice = self.choices[0]
        error = None if self.error is None else str(self.error)
        data = np.zeros(0, dtype=np.float32)
        if self._pooled is not None:
            data = np.frombuffer(self._pooled.data, dtype="<f4").reshape(self._pooled.shape)
        elif error is None:
            error = f"the request ended without a result: {choice.finish_reason}"
        return PoolingRequestOutput(
            self.request_id,
            PoolingOutput(data),
            choice.request.prompt_token_ids,
            num_cached_tokens=choice.num_cached_tokens,
            error=error,
        )
