"""Source code to coloured spans, one line at a time: a fence that grows is never lexed twice."""

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from northchat.tui.theme import token_role

if TYPE_CHECKING:
    from pygments.lexer import Lexer

MAX_LINE = 2_000
"""Characters; longer lines stay plain, since some lexers need quadratic time for one line."""


class Highlighter:
    """Lexes the lines of one fence in order.

    Pygments lexes whole texts. Its regular expression lexers keep a stack of states, so one line can be lexed from the
    stack that the line before it left; rules that look across a line's end see the end of the text instead. Other
    lexers get each line alone.
    """

    def __init__(self, language: str) -> None:
        self._language = language
        self._stack: tuple[str, ...] = ("root",)

    def line(self, text: str) -> list[tuple[str, str]]:
        """The next line, without its end, as (text, syntax role) pairs."""
        pairs, self._stack = self._lex(text)
        return pairs

    def fork(self) -> "Highlighter":
        other = Highlighter(self._language)
        other._stack = self._stack
        return other

    def _lex(self, text: str) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
        lexer = _lexer(self._language) if len(text) <= MAX_LINE else None
        if lexer is None:
            return [(text, "foreground")], self._stack
        stack = list(self._stack)
        tokens = _run(lexer, f"{text}\n", stack) if _is_regex(lexer) else _alone(lexer, f"{text}\n")
        pairs: list[tuple[str, str]] = []
        try:
            for token, piece in tokens:
                role = token_role(token)
                piece = piece.replace("\n", "")
                if pairs and pairs[-1][1] == role:
                    pairs[-1] = (pairs[-1][0] + piece, pairs[-1][1])
                elif piece:
                    pairs.append((piece, role))
        except Exception:  # a lexer's fault must not cost the text
            return [(text, "foreground")], self._stack
        if "".join(piece for piece, _ in pairs) != text:
            return [(text, "foreground")], tuple(stack)
        return pairs, tuple(stack)


@lru_cache(maxsize=64)
def _lexer(language: str) -> "Lexer | None":
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    if not language:
        return None
    try:
        return get_lexer_by_name(language)
    except ClassNotFound:
        return None


def _is_regex(lexer: "Lexer") -> bool:
    from pygments.lexer import RegexLexer

    # A subclass with a loop of its own knows more than its tables say.
    return isinstance(lexer, RegexLexer) and type(lexer).get_tokens_unprocessed is RegexLexer.get_tokens_unprocessed


def _alone(lexer: "Lexer", text: str) -> Iterator[tuple[Any, str]]:
    for _, token, piece in lexer.get_tokens_unprocessed(text):
        yield token, piece


def _run(lexer: Any, text: str, stack: list[str]) -> Iterator[tuple[Any, str]]:
    """Lexes `text` from the states in `stack`, which afterwards holds those that follow."""
    from pygments.token import Text, _TokenType

    at = 0
    while at < len(text):
        for match_at, action, change in lexer._tokens[stack[-1]]:
            if (match := match_at(text, at)) is None:
                continue
            if type(action) is _TokenType:
                yield action, match.group()
            elif action is not None:
                for _, token, piece in action(lexer, match):
                    yield token, piece
            at = match.end()
            _change(stack, change)
            break
        else:
            if text[at] == "\n":
                stack[:] = ["root"]
            yield Text, text[at]
            at += 1


def _change(stack: list[str], change: Any) -> None:
    if change is None:
        return
    if isinstance(change, int):
        del stack[max(1, len(stack) + change) :]
        return
    for state in change if isinstance(change, tuple) else (change,):
        if state == "#pop":
            del stack[max(1, len(stack) - 1) :]
        else:
            stack.append(stack[-1] if state == "#push" else state)
