import pytest

from northchat.agent.commands import COMMANDS, UnknownCommand, parse


@pytest.mark.parametrize(
    ("text", "name", "argument"),
    [
        ("/help", "help", ""),
        ("/?", "help", ""),
        (" /model  qwen3 \n", "model", "qwen3"),
        ("/model http://x/v1", "model", "http://x/v1"),
        ("/theme fjord", "theme", "fjord"),
        ("/clear", "clear", ""),
        ("/quit", "quit", ""),
        ("/exit", "quit", ""),
    ],
)
def test_commands(text: str, name: str, argument: str) -> None:
    parsed = parse(text)
    assert parsed is not None
    assert (parsed[0].name, parsed[1]) == (name, argument)


@pytest.mark.parametrize("text", ["hello", "", "/usr/bin/env is what?", "a /help", "/ help", "//", "why /quit"])
def test_what_is_for_the_model(text: str) -> None:
    assert parse(text) is None


def test_unknown_commands_are_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownCommand, match="did you mean /model"):
        parse("/modle x")
    with pytest.raises(UnknownCommand, match="/help lists"):
        parse("/zzz")


def test_every_listed_command_parses_to_itself() -> None:
    assert [parse(f"/{command.name}") for command in COMMANDS] == [(command, "") for command in COMMANDS]
