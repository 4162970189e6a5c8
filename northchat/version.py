"""The installed version, in one place: importlib.metadata is slow to import, and a source tree may not be installed."""


def current() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("northchat")
    except PackageNotFoundError:
        return "unknown"
