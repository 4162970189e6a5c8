"""Themes: one TOML file each, feeding the widgets' colours, the transcript's roles and Pygments styles alike."""

import os
import tomllib
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from pygments.style import Style as PygmentsStyle
    from textual.theme import Theme as TextualTheme

DEFAULT = "dark"
UI_ROLES = frozenset(
    "background surface panel foreground muted border primary accent success warning error".split()  # noqa: SIM905
)
SYNTAX_ROLES = frozenset(
    "keyword string number comment function class builtin operator decorator tag attribute inserted deleted".split()  # noqa: SIM905
)


class ThemeError(Exception):
    """No such theme, or a file that isn't one; the message names the remedy."""


class Theme(msgspec.Struct, frozen=True):
    """Colours are `#rrggbb`, or `ansi_NAME` for one of the terminal's own sixteen."""

    name: str
    summary: str
    dark: bool
    ui: dict[str, str]
    syntax: dict[str, str]

    @property
    def ansi(self) -> bool:
        return self.ui["background"].startswith("ansi_")


@cache
def names() -> list[str]:
    """All themes: the dark one and the light one first."""
    found = {file.name.removesuffix(".toml") for file in _folder().iterdir() if file.name.endswith(".toml")}
    first = [name for name in ("dark", "light") if name in found]
    return first + sorted(found - set(first))


@cache
def load(name: str) -> Theme:
    """Raises ThemeError when there is no such theme or its file lacks a role."""
    if name not in names():
        raise ThemeError(f"no theme named {name!r}; there are: {', '.join(names())}")
    text = _folder().joinpath(f"{name}.toml").read_text("utf-8")
    try:
        theme = msgspec.convert(tomllib.loads(text), Theme)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ThemeError(f"theme {name}: {error}") from None
    if missing := (UI_ROLES - theme.ui.keys()) | (SYNTAX_ROLES - theme.syntax.keys()):
        raise ThemeError(f"theme {name} lacks {', '.join(sorted(missing))}")
    return theme


def choose(name: str) -> Theme:
    """The theme of that name; `auto` or an empty name looks at the terminal."""
    if name not in ("", "auto"):
        return load(name)
    # COLORFGBG is "foreground;background" as palette numbers; 7 and 15 are the white ones.
    light = os.environ.get("COLORFGBG", "").rpartition(";")[2] in ("7", "15")
    return load("light" if light else DEFAULT)


def textual_theme(theme: Theme) -> "TextualTheme":
    from textual.theme import Theme as TextualTheme

    ui = theme.ui
    return TextualTheme(
        name=theme.name,
        primary=ui["primary"],
        secondary=ui["accent"],
        accent=ui["accent"],
        foreground=ui["foreground"],
        background=ui["background"],
        surface=ui["surface"],
        panel=ui["panel"],
        success=ui["success"],
        warning=ui["warning"],
        error=ui["error"],
        dark=theme.dark,
        ansi=theme.ansi,
        variables=variables(theme),
    )


def variables(theme: Theme) -> dict[str, str]:
    """What our style sheets use beside Textual's own variables."""
    ui = theme.ui
    shared = {
        "muted": ui["muted"],
        "rule": ui["border"],
        "border": ui["primary"],
        "border-blurred": ui["border"],
        "scrollbar": ui["border"],
        "scrollbar-hover": ui["muted"],
        "scrollbar-active": ui["primary"],
        "scrollbar-background": ui["background"],
        "scrollbar-background-hover": ui["background"],
        "scrollbar-background-active": ui["background"],
        "scrollbar-corner-color": ui["background"],
        "screen-selection-background": ui["border"],
        "screen-selection-foreground": ui["foreground"],
        "input-selection-background": ui["border"],
        "input-selection-foreground": ui["foreground"],
    }
    if not theme.ansi:
        return shared
    paper, ink = ("ansi_black", "ansi_white") if theme.dark else ("ansi_white", "ansi_black")
    return shared | {
        "ansi-background": paper,
        "ansi-foreground": ink,
        "input-cursor-background": ink,
        "input-cursor-foreground": paper,
        "input-cursor-text-style": "reverse",
        "input-selection-background": "ansi_cyan",
        "input-selection-foreground": "ansi_black",
        "screen-selection-background": "ansi_cyan",
        "screen-selection-foreground": "ansi_black",
    }


def pygments_style(theme: Theme) -> "type[PygmentsStyle]":
    """The same colours as a Pygments style, for line mode."""
    from pygments.style import Style
    from pygments.token import Token

    styles: dict[Any, str] = {Token: _pygments_colour(theme.ui["foreground"])}
    styles |= {token: _pygments_colour(theme.syntax[role]) for token, role in _token_roles().items()}
    return type(f"{theme.name}Style", (Style,), {"styles": styles, "background_color": ""})


@cache
def _token_roles() -> dict[Any, str]:
    from pygments.token import Comment, Generic, Keyword, Name, Number, Operator, Punctuation, String

    return {
        Keyword: "keyword",
        Operator.Word: "keyword",
        Operator: "operator",
        Punctuation: "operator",
        String: "string",
        Number: "number",
        Comment: "comment",
        Name.Function: "function",
        Name.Class: "class",
        Name.Exception: "class",
        Name.Namespace: "class",
        Name.Builtin: "builtin",
        Name.Constant: "number",
        Name.Decorator: "decorator",
        Name.Tag: "tag",
        Name.Attribute: "attribute",
        Generic.Inserted: "inserted",
        Generic.Deleted: "deleted",
        Generic.Heading: "function",
        Generic.Subheading: "function",
        Generic.Prompt: "comment",
    }


@cache
def token_role(token: Any) -> str:
    """The syntax role of a Pygments token type, or `foreground`."""
    roles = _token_roles()
    while token:
        if token in roles:
            return roles[token]
        token = token.parent
    return "foreground"


def _pygments_colour(colour: str) -> str:
    # Pygments writes the sixteen as ansiblue, ansibrightblue; it knows white as gray and bright white as white.
    if not colour.startswith("ansi_"):
        return colour
    name = colour.removeprefix("ansi_").replace("_", "")
    return {
        "default": "",
        "white": "ansigray",
        "brightwhite": "ansiwhite",
    }.get(name, f"ansi{name}")


def _folder() -> Any:
    return resources.files("northchat").joinpath("themes")
