"""Settings: flags over environment over config.toml over defaults, each value with its origin."""

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from northchat import paths

LOCAL = "local"
"""As base_url: our own engine, whatever the environment says."""

_Url = Annotated[str, msgspec.Meta(pattern=r"^(https?://[^\s/]+\S*|local)$")]
_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class Config(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    """Name, GGUF file or directory for our engine; the server's name for it elsewhere. None: the default there."""
    base_url: _Url | None = None
    """None: our own engine."""
    api_key: str | None = None
    """Sent to base_url."""
    device: Literal["cpu", "cuda"] | None = None
    """None: cuda where it can be used, else cpu."""
    theme: str = "auto"
    """auto: dark or light, after the terminal."""
    system: str = ""
    """System prompt of new conversations."""
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: _Share | None = None
    seed: int | None = None
    host: str = "127.0.0.1"
    """Of --serve."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8642
    serve_key: str | None = None
    """API key that clients of --serve must send."""
    origins: dict[str, str] = {}
    """Key -> where its value comes from."""


KEYS = tuple(name for name in Config.__struct_fields__ if name != "origins")
SECRET = frozenset({"api_key", "serve_key"})
_TYPES = {field.name: field.type for field in msgspec.structs.fields(Config)}
_ENVIRONMENT = {
    "base_url": ("OPENAI_BASE_URL",),
    "api_key": ("OPENAI_API_KEY",),
    "model": ("NORTHCHAT_MODEL", "OPENAI_MODEL"),
    "device": ("NORTHCHAT_DEVICE",),
    "theme": ("NORTHCHAT_THEME",),
    "serve_key": ("NORTHCHAT_API_KEY",),
}
_EXPECTED = {
    "base_url": f"a URL such as http://127.0.0.1:11434/v1, or {LOCAL}",
    "device": "cpu or cuda",
    "temperature": "a number from 0 to 2",
    "top_p": "a number over 0, at most 1",
    "seed": "a whole number",
    "port": "a whole number from 0 to 65535",
}


class ConfigError(Exception):
    """A setting can't be used: one line with its place and the remedy."""


def path() -> Path:
    return paths.config_dir() / "config.toml"


def load(flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ) -> Config:
    """`flags` maps keys to what the command line gave; None stands for a flag that wasn't given.

    Raises ConfigError.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = dict.fromkeys(KEYS, "default")
    for key, value, where in [*_from_file(path()), *_from_environment(environ), *_from_flags(flags or {})]:
        values[key], origins[key] = _checked(key, value, where), where
    if values.get("base_url") == LOCAL:
        del values["base_url"]
    if values.get("base_url") is None and origins["model"] == "OPENAI_MODEL":
        # It names a model of the server that OPENAI_BASE_URL would name.
        del values["model"]
        origins["model"] = "default"
    return Config(**values, origins=origins)


def _from_file(file: Path) -> list[tuple[str, Any, str]]:
    import tomllib

    try:
        text = file.read_text("utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {file}: {error}") from None
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is no TOML: {error}; strings need quotes, as in theme = 'dark'") from None
    entries = []
    for key, value in table.items():
        where = f"{file}:{_line(text, key)}"
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            raise ConfigError(
                f"{where}: unknown setting {key!r}; "
                + (f"did you mean {near[0]!r}?" if near else f"there are {', '.join(KEYS)}")
            )
        entries.append((key, value, where))
    return entries


def _line(text: str, key: str) -> int:
    pattern = re.compile(rf"\s*\[*\s*['\"]?{re.escape(key)}['\"]?\s*[=.\]]")
    return next((number for number, line in enumerate(text.splitlines(), 1) if pattern.match(line)), 1)


def _from_environment(environ: Mapping[str, str]) -> list[tuple[str, Any, str]]:
    """Empty variables count as unset."""
    found = []
    for key, names in _ENVIRONMENT.items():
        if name := next((name for name in names if environ.get(name)), None):
            found.append((key, environ[name], name))
    return found


def _from_flags(flags: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    names = {key: f"--{key.replace('_', '-')}" for key in KEYS} | {"serve_key": "--api-key"}
    return [(key, value, names[key]) for key, value in flags.items() if value is not None]


def _checked(key: str, value: Any, where: str) -> Any:
    try:
        return msgspec.convert(value, _TYPES[key])
    except msgspec.ValidationError:
        shown = "(hidden)" if key in SECRET else repr(value)
        raise ConfigError(f"{where}: {key} can't be {shown}; it takes {_EXPECTED.get(key, 'text')}") from None
