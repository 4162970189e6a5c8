"""Grammars of answers: which ids may come next. llguidance parses; this says when, and within what limits.

A grammar is Lark in llguidance's dialect (chat/schema.py writes it) over ids and their bytes. It begins where the
answer does, and ends with an id that ends the answer.
"""

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT = 32
"""Compiled grammars: agents send the same tools with each request."""


class GrammarError(Exception):
    """A grammar can't be followed; the message is one line."""


class Matcher:
    """How far one answer is."""

    def __init__(self, matcher: "LLMatcher", generated: Sequence[int]) -> None:
        self._matcher = matcher
        self.mask = b""
        """Bit n % 8 of byte n // 8: whether id n may come next."""
        self.problem = ""
        """Why it can't go on, in one line."""
        if generated:
            matcher.consume_tokens(list(generated))
        self._look()

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._look()

    def _look(self) -> None:
        self.mask = b"" if self._matcher.is_error() else self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self.problem = f"the answer's grammar can't be followed: {_line(self._matcher.get_error())}"
        elif not any(self.mask):
            self.problem = "the answer's grammar allows nothing more"


class Grammars:
    """Compiles on a thread of its own, so that requests without a grammar don't wait.

    The tables of a large vocabulary take hundreds of megabytes, and seconds to build: they are made when the first
    grammar comes.
    """

    def __init__(self, tokenizer_json: Path | None, vocab_size: int) -> None:
        self._path, self._vocab_size = tokenizer_json, vocab_size
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._tables: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def start(self, grammar: str, generated: Sequence[int]) -> Future[Matcher]:
        """A matcher for an answer of which the ids `generated` exist already.

        The future raises GrammarError, or ModelError when the tokenizer can't be read.
        """
        return self._thread.submit(self._start, grammar, generated)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _start(self, grammar: str, generated: Sequence[int]) -> Matcher:
        known = self._compiled.pop(grammar, None)
        if known is None:
            known = self._compile(grammar)
            if len(self._compiled) >= KEPT:
                self._compiled.popitem(last=False)
        self._compiled[grammar] = known
        matcher = Matcher(known.deep_copy(), generated)
        if matcher.problem:
            raise GrammarError(matcher.problem)
        return matcher

    def _compile(self, grammar: str) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        if self._tables is None:
            self._tables = self._load()
        limits = LLParserLimits(verbose_errors=False)
        try:
            compiled = LLMatcher(self._tables, grammar, log_level=0, limits=limits)
        except BaseException as error:  # the library panics on some nonsense, and a panic is no Exception
            raise GrammarError(f"the answer's grammar makes no sense ({type(error).__name__})") from error
        if compiled.is_error():
            raise GrammarError(_line(compiled.get_error()))
        return compiled

    def _load(self) -> "LLTokenizer":
        from llguidance import LLTokenizer, TokenizerWrapper

        from northchat.model.tokenizer import token_table

        if self._path is None:
            raise GrammarError("answers can't be held to a grammar: the engine was started without a tokenizer")
        table, markers = token_table(self._path)
        # Without an end of its own: a grammar names the id that ends the answer.
        return LLTokenizer(TokenizerWrapper(_Vocabulary(table, markers)), n_vocab=max(self._vocab_size, len(table)))


class _Vocabulary:
    """What llguidance asks of a tokenizer. Text is never encoded: grammars force no ids, they allow them."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], markers: Sequence[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = markers
        self.eos_token_id = markers[0] if markers else 0

    def __call__(self, text: bytes) -> list[int]:
        return []


def _line(message: str) -> str:
    return " ".join(message.replace("<non-verbose/>", "").split())[:300]
