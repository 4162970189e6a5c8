from pathlib import Path
from typing import Any

import pytest

from northchat import config
from northchat.config import ConfigError


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "northchat" / "config.toml"
    path.parent.mkdir()
    return path


def load(flags: dict[str, Any] | None = None, **environ: str) -> config.Config:
    return config.load(flags, environ)


def test_without_anything_all_is_default(file: Path) -> None:
    settings = load()
    assert (settings.model, settings.base_url, settings.theme) == (None, None, "auto")
    assert set(settings.origins.values()) == {"default"}


def test_flags_win_over_environment_over_file_and_origins_say_so(file: Path) -> None:
    file.write_text("# mine\ntheme = 'fjord'\ndevice = 'cpu'\nmodel = 'from-file'\ntemperature = 1\n")
    settings = load({"model": "from-flag", "device": None}, NORTHCHAT_MODEL="from-env", NORTHCHAT_DEVICE="cuda")
    assert (settings.model, settings.device, settings.theme, settings.temperature) == ("from-flag", "cuda", "fjord", 1)
    assert settings.origins["model"] == "--model"
    assert settings.origins["device"] == "NORTHCHAT_DEVICE"
    assert settings.origins["theme"] == f"{file}:2"
    assert settings.origins["system"] == "default"


def test_openai_model_names_a_model_of_the_remote_server_only(file: Path) -> None:
    assert load(OPENAI_MODEL="gpt-9").model is None
    assert load(OPENAI_MODEL="gpt-9", OPENAI_BASE_URL="https://api.example/v1").model == "gpt-9"
    assert load({"base_url": "local"}, OPENAI_MODEL="gpt-9", OPENAI_BASE_URL="https://api.example/v1").model is None


def test_base_url_local_chooses_our_engine_whatever_the_environment_says(file: Path) -> None:
    settings = load({"base_url": "local"}, OPENAI_BASE_URL="https://api.example/v1")
    assert settings.base_url is None
    assert settings.origins["base_url"] == "--base-url"


def test_empty_variables_count_as_unset(file: Path) -> None:
    assert load(OPENAI_BASE_URL="", NORTHCHAT_DEVICE="").origins["base_url"] == "default"


@pytest.mark.parametrize(
    ("text", "line", "parts"),
    [
        ("theme = 'dark'\nmodle = 'x'\n", 2, ["'modle'", "did you mean 'model'"]),
        ("zzz = 1\n", 1, ["'zzz'", "there are model, base_url"]),
        ("\n[serve]\nport = 1\n", 2, ["'serve'"]),
        ("\n\ndevice = 'tpu'\n", 3, ["device", "'tpu'", "cpu or cuda"]),
        ("temperature = 'hot'\n", 1, ["temperature", "0 to 2"]),
        ("temperature = 3.5\n", 1, ["temperature", "0 to 2"]),
        ("base_url = 'localhost:8000'\n", 1, ["base_url", "http://127.0.0.1:11434/v1"]),
        ("port = 70000\n", 1, ["port", "65535"]),
    ],
)
def test_a_bad_file_ends_in_one_line_with_its_place(file: Path, text: str, line: int, parts: list[str]) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load()
    message = str(caught.value)
    assert message.startswith(f"{file}:{line}: ")
    assert "\n" not in message
    assert all(part in message for part in parts)


def test_broken_toml_and_undecodable_bytes_are_named(file: Path) -> None:
    file.write_text("theme = dark\n")
    with pytest.raises(ConfigError, match=r"no TOML.*line 1.*quotes"):
        load()
    file.write_bytes(b"theme = '\xff'\n")
    with pytest.raises(ConfigError, match="can't read"):
        load()


def test_a_bad_variable_is_named_and_a_secret_never_shown(file: Path) -> None:
    with pytest.raises(ConfigError, match="NORTHCHAT_DEVICE: device can't be 'tpu'; it takes cpu or cuda"):
        load(NORTHCHAT_DEVICE="tpu")
    file.write_text("api_key = 12345\n")
    with pytest.raises(ConfigError) as caught:
        load()
    assert "12345" not in str(caught.value)
