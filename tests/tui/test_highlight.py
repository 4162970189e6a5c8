import argparse
import inspect

import pytest
from pygments.lexers import get_lexer_by_name

from northchat.tui.highlight import MAX_LINE, Highlighter
from northchat.tui.theme import token_role

SAMPLES = {
    "python": inspect.getsource(argparse),
    "rust": 'fn main() {\n    /* over\n       lines */\n    let x = "a\\n";\n}\n',
    "bash": 'for i in *; do\n  echo "$i"  # each\ndone\n',
    "c": "#include <x.h>\nint main(void) {\n  return 0; // ok\n}\n",
    "diff": "--- a\n+++ b\n@@ -1 +1 @@\n-old\n+new\n",
    "css": "a:hover {\n  color: #fff; /* x */\n}\n",
}


def by_character(pairs: list[tuple[str, str]]) -> str:
    return "".join(f"{role[0:3]}{character}" for text, role in pairs for character in text if not character.isspace())


@pytest.mark.parametrize("language", SAMPLES)
def test_line_by_line_is_coloured_as_a_whole(language: str) -> None:
    source = SAMPLES[language]
    highlighter = Highlighter(language)
    lines = [pair for line in source.splitlines() for pair in highlighter.line(line)]
    whole = [(text, token_role(token)) for token, text in get_lexer_by_name(language).get_tokens(source)]
    assert by_character(lines) == by_character(whole)


def test_a_fork_leaves_the_original_where_it_was() -> None:
    highlighter = Highlighter("python")
    highlighter.line('x = """open')
    assert highlighter.fork().line('closed"""') == [('closed"""', "string")]
    assert highlighter.line("still a string") == [("still a string", "string")]


@pytest.mark.parametrize("language", ["", "no-such-language", "python"])
def test_what_cannot_be_coloured_is_plain(language: str) -> None:
    line = "x" * (MAX_LINE + 1) if language == "python" else "if x"
    assert Highlighter(language).line(line) == [(line, "foreground")]


@pytest.mark.parametrize("language", ["json", "console", "html+jinja", "yaml", "markdown", "html", "pycon"])
def test_no_text_is_lost_with_lexers_of_other_kinds(language: str) -> None:
    for line in ('{"a": [1, true]}', "$ ls -l", "<b>{{ x }}</b>", "", "    - `x`: |", ">>> 1"):
        assert "".join(text for text, _ in Highlighter(language).line(line)) == line
