import stat
from pathlib import Path

from northchat.tui.prompt import History


def test_older_and_newer_and_the_draft_comes_back(tmp_path: Path) -> None:
    history = History(tmp_path / "deep/history.jsonl")
    for text in ("one", "two\nlines", "two\nlines", "three"):
        history.add(text)
    assert [history.older("draft") for _ in range(4)] == ["three", "two\nlines", "one", None]
    assert [history.newer() for _ in range(4)] == ["two\nlines", "three", "draft", None]


def test_it_is_the_users_alone_and_survives_a_torn_line(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    History(file).add("first")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with file.open("ab") as lines:
        lines.write(b'"\\u001b[31mred"\n42\n\xff\xfe\n"torn')
    history = History(file)
    assert [history.older("") for _ in range(3)] == ["red", "first", None]


def test_a_place_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    history = History(tmp_path / "file/history.jsonl")
    history.add("kept for this session")
    assert history.older("") == "kept for this session"
