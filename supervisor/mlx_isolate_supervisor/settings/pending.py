"""Settings that are understood and checked but have no effect yet, so that nobody relies on one."""

from mlx_isolate_supervisor.config import ServeSettings

_SENTENCE = "{} is understood but has no effect in this version."


def pending_sentences(settings: ServeSettings) -> tuple[str, ...]:
    """One sentence for each such setting that was given a value."""
    given = {
        "--models-max": settings.models_max > 0,
        "--ttl": settings.ttl_s > 0 or any(model.ttl_s for model in settings.models),
        "groups": any(group.swap or group.exclusive for group in settings.groups),
        "sendLoadingState": any(model.send_loading_state for model in settings.models),
    }
    return tuple(_SENTENCE.format(name) for name, is_given in given.items() if is_given)
