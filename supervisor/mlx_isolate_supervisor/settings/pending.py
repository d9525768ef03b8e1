"""Settings that are understood and checked but have no effect yet, so that nobody relies on one."""

from mlx_isolate_supervisor.config import ServeSettings

_SENTENCE = "{} is understood but has no effect in this version."


def pending_sentences(settings: ServeSettings) -> tuple[str, ...]:
    """One sentence for each such setting that was given a value."""
    given = {"sendLoadingState": any(model.send_loading_state for model in settings.models)}
    return tuple(_SENTENCE.format(name) for name, is_given in given.items() if is_given)
