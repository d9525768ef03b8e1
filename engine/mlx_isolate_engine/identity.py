"""Who answers: the names and facts that responses carry."""

import hashlib
import time

import msgspec

from mlx_isolate_shared.wire import ModelFacts, Start


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The served model as responses name it.

    Attributes:
        model: the id that clients use.
        created: seconds since the epoch at which this engine was ready.
        fingerprint: changes with the model, the adapter and the versions that compute.
    """

    model: str
    created: int
    fingerprint: str
    facts: ModelFacts

    def fingerprint_with(self, adapter: str | None) -> str:
        """The fingerprint of an answer that was made with this adapter, None = with none."""
        if adapter is None:
            return self.fingerprint
        return _fingerprint((self.fingerprint, adapter))

    @staticmethod
    def of(start: Start, facts: ModelFacts) -> "Identity":
        """The identity of the model that `start` describes."""
        settings = start.settings
        parts = (
            start.model_id,
            start.model,
            settings.adapter_path,
            sorted(settings.adapters.items()),
            settings.draft_model,
            settings.kv_bits,
            settings.kv_group_size,
            settings.quantized_kv_start,
            facts.architecture,
            facts.dtype,
            facts.weights_bytes,
            facts.mlx_version,
            facts.mlx_lm_version,
            facts.backend,
        )
        return Identity(
            model=start.model_id,
            created=int(time.time()),
            fingerprint=_fingerprint(parts),
            facts=facts,
        )


def _fingerprint(parts: tuple[object, ...]) -> str:
    return f"fp_{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"
