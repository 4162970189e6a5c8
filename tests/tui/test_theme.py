import pytest
from pygments.token import Comment, Keyword, String, Token

from northchat.tui import theme as themes

# xterm's palette, the common denominator of what `ansi_NAME` stands for.
XTERM = {
    "black": "#000000",
    "red": "#cd0000",
    "green": "#00cd00",
    "yellow": "#cdcd00",
    "blue": "#0000ee",
    "magenta": "#cd00cd",
    "cyan": "#00cdcd",
    "white": "#e5e5e5",
    "bright_black": "#7f7f7f",
    "bright_red": "#ff0000",
    "bright_green": "#00ff00",
    "bright_yellow": "#ffff00",
    "bright_blue": "#5c5cff",
    "bright_magenta": "#ff00ff",
    "bright_cyan": "#00ffff",
    "bright_white": "#ffffff",
}


def luminance(colour: str) -> float:
    """WCAG 2's relative luminance."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def colour(value: str, default: str) -> str:
    if not value.startswith("ansi_"):
        return value
    name = value.removeprefix("ansi_")
    return default if name == "default" else XTERM[name]


@pytest.mark.parametrize("name", themes.names())
def test_all_text_can_be_read_on_every_ground_it_stands_on(name: str) -> None:
    theme = themes.load(name)
    paper, ink = ("#000000", "#ffffff") if theme.dark else ("#ffffff", "#000000")
    least = 7.0 if name == "high-contrast" else 4.5
    for ground in ("background", "surface", "panel"):
        behind = colour(theme.ui[ground], paper)
        for role, value in (theme.ui | theme.syntax).items():
            if role in ("background", "surface", "panel", "border"):
                continue
            assert contrast(colour(value, ink), behind) >= least, (role, ground)


def test_there_is_a_choice() -> None:
    assert len(themes.names()) >= 8
    assert themes.names()[:2] == ["dark", "light"]
    kinds = [themes.load(name) for name in themes.names()]
    assert {theme.dark for theme in kinds} == {True, False}
    assert any(theme.ansi for theme in kinds)
    assert all(theme.name == name and theme.summary for theme, name in zip(kinds, themes.names(), strict=True))


def test_an_unknown_theme_is_refused_with_the_list() -> None:
    with pytest.raises(themes.ThemeError, match=r"no theme named 'nope'; there are: dark, light, "):
        themes.load("nope")


def test_auto_looks_at_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLORFGBG", "0;15")
    assert themes.choose("auto").name == "light"
    monkeypatch.setenv("COLORFGBG", "15;0")
    assert themes.choose("auto").name == "dark"
    assert themes.choose("ember").name == "ember"


@pytest.mark.parametrize("name", themes.names())
def test_pygments_and_textual_wear_the_same_colours(name: str) -> None:
    theme = themes.load(name)
    style = themes.pygments_style(theme)
    for token, role in ((Keyword, "keyword"), (String, "string"), (Comment, "comment")):
        wanted = theme.syntax[role]
        if wanted.startswith("#"):
            assert f"#{style.style_for_token(token)['color']}" == wanted
        else:
            assert (style.style_for_token(token)["ansicolor"] or "ansidefault").startswith("ansi")
    assert style.style_for_token(Token) is not None
    worn = themes.textual_theme(theme)
    assert (worn.background, worn.dark, worn.ansi) == (theme.ui["background"], theme.dark, theme.ansi)
