"""The last hour of a few figures per model, for the charts of the page.

Samples are kept encoded, so that an hour of one model costs tens of kilobytes and an answer is a
join. Knows nothing of slots: it is told figures and remembers them.
"""

from collections import deque

import msgspec

# One sample per interval and model; an hour of them is kept.
SAMPLE_INTERVAL_S = 5.0
SAMPLES_MAX = 720
# Models remembered; without it a client that loads ever new names fills the memory.
MODELS_MAX = 64


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One row of a chart, encoded as an array in this order.

    Attributes:
        time: wall clock, seconds.
        state: the slot's state in lower case.
        tokens_per_s: tokens generated per second since the sample before.
        prompt_tokens_per_s: prompt tokens processed per second likewise.
        ttft_s: mean time to first token of the requests whose first token came since then.
        footprint_bytes: memory of the engine process.
        restarts: engines started after a crash, since the supervisor's start.
        active: requests in the engine.
        queued: requests that wait.
    """

    time: float
    state: str
    tokens_per_s: float
    prompt_tokens_per_s: float
    ttft_s: float | None
    footprint_bytes: int
    restarts: int
    active: int
    queued: int


FIELDS = Sample.__struct_fields__


class History:
    """Encoded samples by model, oldest first."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[tuple[float, bytes]]] = {}

    def add(self, model: str, sample: Sample) -> None:
        """Remember one sample; of more models than MODELS_MAX the longest known is forgotten."""
        ring = self._samples.get(model)
        if ring is None:
            while len(self._samples) >= MODELS_MAX:
                del self._samples[next(iter(self._samples))]
            ring = self._samples[model] = deque(maxlen=SAMPLES_MAX)
        # The clock was set back: what lies ahead of it now would be told as newer for as long.
        while ring and ring[-1][0] > sample.time:
            ring.pop()
        ring.append((sample.time, msgspec.json.encode(sample)))

    def retain(self, models: set[str]) -> None:
        """Forget models that are no longer served."""
        for gone in self._samples.keys() - models:
            del self._samples[gone]

    def encode(self, since: float, now: float) -> bytes:
        """JSON: {"now", "interval_s", "fields", "models": {name: [samples with time > since]}}.

        Args:
            since: seconds since the epoch, as is `now`.
            now: told along, so that a reader with another clock can place the samples.
        """
        models = b",".join(
            msgspec.json.encode(name)
            + b":["
            + b",".join(data for time, data in ring if time > since)
            + b"]"
            for name, ring in self._samples.items()
        )
        fields = msgspec.json.encode(FIELDS)
        return b'{"now":%.3f,"interval_s":%g,"fields":%s,"models":{%s}}' % (
            now,
            SAMPLE_INTERVAL_S,
            fields,
            models,
        )
