from pathlib import Path

import pytest

from northchat.doctor import doctor


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("DATA", "CONFIG", "STATE", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_a_sound_machine_is_described(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor() == 0
    report = capsys.readouterr().out
    assert "NorthChat can work here." in report
    for found in ("python", "torch", "terminal", str(home / "DATA"), "smollm2-135m is not here yet", "none is running"):
        assert found in report, found
    assert "FAIL" not in report


def test_what_is_amiss_comes_with_a_remedy(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/dev/null/here")
    monkeypatch.setenv("TERM", "dumb")
    broken = home / "site" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libtorch_cpu.so: not found')")
    monkeypatch.setenv("PYTHONPATH", str(broken.parent))
    assert doctor() == 1
    report = capsys.readouterr().out
    assert "can't work here" in report
    assert "set XDG_DATA_HOME to a folder that is" in report
    assert "ImportError: libtorch_cpu.so: not found" in report
    assert "northchat --plain works in any terminal" in report
