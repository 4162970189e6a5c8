from hypothesis import given
from hypothesis import strategies as st

from northchat.tui.thrift import thrifty, thrifty_driver

Cell = tuple[str, frozenset[str], str, str]


def cells(data: str, width: int = 200) -> dict[tuple[int, int], Cell]:
    """A terminal, as much of one as is needed: what stands where, in which style."""
    screen: dict[tuple[int, int], Cell] = {}
    row = column = 0
    attributes: set[str] = set()
    colours = {"3": "", "4": ""}
    at = 0
    while at < len(data):
        if data[at] == "\n":
            row, at = row + 1, at + 1
            continue
        if data[at] != "\x1b":
            screen[row, column] = (data[at], frozenset(attributes), colours["3"], colours["4"])
            column, at = column + 1, at + 1
            continue
        end = at + 2
        while data[end] in "0123456789;":
            end += 1
        numbers = data[at + 2 : end]
        match data[end]:
            case "H":
                row, column = (int(number) for number in numbers.split(";"))
            case "X":
                for each in range(int(numbers)):
                    screen[row, column + each] = (" ", frozenset(), colours["3"], colours["4"])
            case "C":
                column += int(numbers)
            case "m":
                codes = numbers.split(";")
                while codes:
                    code = codes.pop(0)
                    if code in ("38", "48"):
                        colours[code[0]] = ";".join(codes[:4])
                        del codes[:4]
                    elif code in ("39", "49"):
                        colours[code[0]] = ""
                    elif code in ("", "0"):
                        attributes.clear()
                        colours = {"3": "", "4": ""}
                    else:
                        attributes.add(code)
        at = end + 1
    return {place: visible(cell) for place, cell in screen.items() if place[1] < width}


def visible(cell: Cell) -> Cell:
    """Of a blank only its ground is seen, unless something is drawn on it."""
    text, attributes, _, ground = cell
    return cell if text != " " or attributes & {"4", "9"} else (" ", frozenset(), "", ground)


codes = st.lists(
    st.sampled_from(["1", "3", "4", "9", "38;2;1;2;3", "38;2;9;9;9", "48;2;0;0;0", "48;2;7;7;7"]),
    unique=True,
    max_size=4,
).map(";".join)
texts = st.sampled_from(["a", "word", " " * 20, "x" + " " * 15 + "y"])
segments = st.tuples(codes, texts).map(lambda pair: f"\x1b[{pair[0]}m{pair[1]}\x1b[0m" if pair[0] else pair[1])
lines = st.tuples(st.integers(0, 3), st.lists(segments, max_size=6)).map(lambda it: f"\x1b[{it[0]};1H" + "".join(it[1]))
frames = st.lists(lines, max_size=4).map("\n".join)


@given(frames, st.booleans())
def test_the_cells_are_the_same(frame: str, erases: bool) -> None:
    assert cells(thrifty(frame, erases)) == cells(frame)


def test_a_line_of_code_costs_about_half() -> None:
    ground = "48;2;16;20;27"
    words = [
        ("191;174;245", "def"),
        ("215;221;231", " "),
        ("124;199;234", "reverse"),
        ("179;191;206", "(text):" + " " * 80),
    ]
    frame = "\x1b[3;1H" + "".join(f"\x1b[38;2;{colour};{ground}m{text}\x1b[0m" for colour, text in words)
    assert len(thrifty(frame, True)) < len(frame) * 0.55
    assert thrifty(frame, False).count(ground) == 1


def test_the_style_never_leaks_out_of_a_frame() -> None:
    assert thrifty("\x1b[1mbold", True).endswith("\x1b[0m")
    assert thrifty("plain", True) == "plain"


def test_control_sequences_pass_as_they_are() -> None:
    written: list[str] = []

    class Recorder:
        def write(self, data: str) -> None:
            written.append(data)

    driver = thrifty_driver(Recorder)()  # type: ignore[arg-type, call-arg]
    for sequence in ("\x1b[?1049h", "\x1b[?2026h", "\x1b]52;c;bWFt\x07", "\x1b[2J"):
        driver.write(sequence)
    assert written == ["\x1b[?1049h", "\x1b[?2026h", "\x1b]52;c;bWFt\x07", "\x1b[2J"]
