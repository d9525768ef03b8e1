"""The version of this distribution."""


def installed_version() -> str:
    """The installed version, or `0+source` where it runs from a bare source tree."""
    # Imported late: it costs 15 ms and few commands need it.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("mlx-isolate")
    except PackageNotFoundError:
        return "0+source"
