import pytest


@pytest.fixture(autouse=True)
def _own_home(home: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's history, or asks servers that happen to run on this machine."""
    monkeypatch.setattr("northchat.agent.backend.SERVERS", {})
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLORTERM", "truecolor")
