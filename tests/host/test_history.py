from northchat.host.history import History
from northchat.messages import Message, ToolCall


def answer(content: str, reasoning: str = "", *calls: ToolCall) -> Message:
    return Message("assistant", content, reasoning, list(calls))


def test_an_answer_is_known_by_what_clients_send_back_of_it() -> None:
    history = History()
    history.remember(answer(" Hi. ", "hm", ToolCall("a", "f", '{"x": 1, "y": 2}')), [1, 2])
    for again in (
        answer("Hi.", "hm", ToolCall("a", "f", '{"x": 1, "y": 2}')),
        answer("Hi.", "", ToolCall("other", "f", '{"y":2,"x":1}')),
    ):
        assert list(history.recall(again) or []) == [1, 2]
    for other in (
        answer("Hi", "hm", ToolCall("a", "f", '{"x": 1, "y": 2}')),
        answer("Hi.", "changed", ToolCall("a", "f", '{"x": 1, "y": 2}')),
        answer("Hi.", "hm", ToolCall("a", "f", '{"x": 1}')),
        answer("Hi.", "hm"),
    ):
        assert history.recall(other) is None


def test_the_least_recently_used_is_forgotten() -> None:
    history = History(capacity=6)
    for name in "abc":
        history.remember(answer(name), [1, 2])
    assert history.recall(answer("a")) is not None
    history.remember(answer("d"), [3, 4])
    assert history.recall(answer("b")) is None
    assert history.recall(answer("a")) is not None
    history.remember(answer("a"), [5])
    assert list(history.recall(answer("a")) or []) == [5]
    assert history.recall(answer("c")) is not None
