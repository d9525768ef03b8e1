"""The one error of finding or loading a model: an engine that meets it exits with 78."""


class ModelError(Exception):
    """The model can never work as configured, until its files or the settings change.

    Args:
        code: a stable word: `model_missing`, `model_broken`, `model_unsupported`,
            `model_untrusted`, `model_offline`, `model_gated`, `model_download`, `adapter_broken`,
            `template_broken`, `demo_missing`, `demo_broken`, `disk_full`.
        message: one sentence for a person that says what to do; it may name a local path.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
