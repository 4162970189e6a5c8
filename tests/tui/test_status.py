import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from northchat.messages import Stats
from northchat.tui.status import SEPARATOR, State, fit, parts

FULL = State(
    phase="answering",
    model="smollm2-135m",
    device="CPU, 2 threads",
    limits="demo, chat only",
    stats=Stats(tok_s=84.2, ttft_s=0.21, context_used=812, context_limit=8_192, cached_tokens=512),
)


def texts(state: State, width: int) -> list[str]:
    return [part.text for part in fit(parts(state), width)]


def test_everything_where_there_is_room() -> None:
    assert texts(FULL, 200) == [
        "⠋ answering",
        "84 tok/s",
        "TTFT 0.21 s",
        "512 cached",
        "context 812 of 8,192",
        "demo, chat only",
        "smollm2-135m",
        "CPU, 2 threads",
    ]


def test_sixty_columns_keep_what_matters() -> None:
    assert texts(FULL, 58) == ["⠋ answering", "84 tok/s", "demo, chat only", "smollm2-135m"]


def test_a_remote_server_is_named_on_the_narrowest_terminal() -> None:
    state = State(phase="ready", model="a-model-with-a-long-name", remote="models.example.org:8443")
    assert texts(state, 30) == ["● ready", "at models.example.org:8443"]


@given(st.integers(20, 200))
def test_narrower_never_shows_more(width: int) -> None:
    assert set(texts(FULL, width)) <= set(texts(FULL, width + 1))
    assert cell_len(SEPARATOR.join(texts(FULL, max(width, 26)))) <= max(width, 26)


@pytest.mark.parametrize(
    ("phase", "busy"), [("ready", False), ("failed", False), ("loading 3%", True), ("thinking", True)]
)
def test_only_work_is_animated(phase: str, busy: bool) -> None:
    assert State(phase=phase).busy == busy
    assert parts(State(phase=phase))[0].text == f"{'⠋' if busy else '●'} {phase}"
