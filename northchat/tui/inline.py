"""Text inside a block: emphasis, code and links as spans that know how they look."""

import re
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from northchat.sanitize import clean

if TYPE_CHECKING:
    from markdown_it import MarkdownIt

MAX_INLINE = 20_000
"""Characters; longer paragraphs are shown as they are."""
_CELL_END = re.compile(r"(?<!\\)\|")


class Look(NamedTuple):
    """How a piece of text looks; `role` is a name that a theme has a colour for."""

    role: str = "foreground"
    bold: bool = False
    italic: bool = False
    strike: bool = False
    underline: bool = False
    link: str = ""


PLAIN = Look()


class Span(NamedTuple):
    text: str
    look: Look = PLAIN


@cache
def _parser() -> "MarkdownIt":
    from markdown_it import MarkdownIt

    # Entities stay as the model wrote them: they could spell characters that the sanitiser has no say over.
    return MarkdownIt("commonmark", {"maxNesting": 40}).enable("strikethrough").disable(["entity", "html_inline"])


@lru_cache(maxsize=256)
def inline(text: str, look: Look = PLAIN) -> tuple[Span, ...]:
    """Emphasis, code, links of a paragraph; its line breaks stay in the spans' text."""
    if len(text) > MAX_INLINE or not re.search(r"[*_`\[\]\\~<!]", text):
        return (Span(text, look),)
    spans: list[Span] = []
    looks = [look]
    target, start = "", 0
    for token in _parser().parseInline(text)[0].children or []:
        match token.type:
            case "text":
                spans.append(Span(token.content, looks[-1]))
            case "softbreak" | "hardbreak":
                spans.append(Span("\n", looks[-1]))
            case "code_inline":
                spans.append(Span(token.content, looks[-1]._replace(role="code")))
            case "strong_open":
                looks.append(looks[-1]._replace(bold=True))
            case "em_open":
                looks.append(looks[-1]._replace(italic=True))
            case "s_open":
                looks.append(looks[-1]._replace(strike=True))
            case "link_open":
                target, start = clean(str(token.attrGet("href") or "")), len(spans)
                looks.append(looks[-1]._replace(role="link", underline=True, link=target))
            case "link_close":
                shown = "".join(span.text for span in spans[start:])
                looks.pop()
                # What a link hides must be readable: its text may claim another address.
                if target and target not in (shown, f"mailto:{shown}"):
                    spans.append(Span(f" ({target})", looks[-1]._replace(role="muted")))
            case "image":
                address = clean(str(token.attrGet("src") or ""))
                spans.append(Span(f"{token.content or 'image'} ({address})", looks[-1]._replace(role="link")))
            case "strong_close" | "em_close" | "s_close":
                looks.pop()
            case _:
                spans.append(Span(token.content, looks[-1]))
    return tuple(span for span in spans if span.text)


def split_lines(spans: tuple[Span, ...]) -> list[tuple[Span, ...]]:
    """Cuts spans at their line breaks."""
    lines: list[list[Span]] = [[]]
    for span in spans:
        first, *others = span.text.split("\n")
        lines[-1].append(Span(first, span.look))
        lines.extend([Span(other, span.look)] for other in others)
    return [tuple(span for span in line if span.text) for line in lines]


def split_cells(line: str) -> list[str]:
    line = line.strip().removeprefix("|")
    if line.endswith("|") and not line.endswith("\\|"):
        line = line[:-1]
    return _CELL_END.split(line)


def inline_cells(line: str) -> tuple[tuple[Span, ...], ...]:
    return tuple(inline(cell.strip().replace("\\|", "|")) for cell in split_cells(line))
