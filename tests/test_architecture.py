"""Rooms and what each may enter; ARCHITECTURE.md shows the same."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import northchat

PACKAGE = Path(northchat.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

GROUND = {"messages", "paths", "sanitize", "version"}
ROOMS: dict[str, set[str]] = {
    **{room: set() for room in GROUND},
    "_megakernel": set(),
    # what front ends stand on
    "config": {"paths"},
    "rendezvous": {"paths"},
    "wire": {"messages"},
    "unix_transport": set(),
    "client": {"messages", "unix_transport", "wire"},
    "launch": {"client", "paths", "rendezvous", "version"},
    "lend": {"client"},
    "agent": {*GROUND, "client", "config", "launch"},
    # front ends
    "tui": {*GROUND, "agent", "client", "config"},
    "headless": {*GROUND, "agent", "client", "config"},
    "lines": {"tui"},
    "terminal": {*GROUND, "agent", "tui"},
    "repl": {*GROUND, "agent", "client", "config", "lines", "terminal", "tui"},
    # the engine and what it reads
    "model": {"messages", "paths"},
    "chat": {"messages"},
    "engine": {"_megakernel", "model"},
    "host": {*GROUND, "chat", "engine", "model", "rendezvous"},
    # the command line
    "completion": set(),
    "doctor": {*GROUND, "launch", "model"},
    "manage": {*GROUND, "config", "doctor", "launch"},
    "cli": {
        *GROUND,
        "agent",
        "completion",
        "config",
        "headless",
        "host",
        "launch",
        "lend",
        "manage",
        "model",
        "repl",
        "tui",
    },
    "__main__": {"cli"},
}
LIGHT = ["cli", "config", "paths", "messages", "sanitize", "wire", "client", "launch", "headless", "repl", "manage"]
LIGHT += ["tui.app", *(f"agent.{file.stem}" for file in (PACKAGE / "agent").glob("[a-z]*.py"))]
HEAVY = {"torch", "numpy", "tokenizers", "gguf", "huggingface_hub", "transformers", "safetensors"}


def room(module: str) -> str:
    """Of `northchat.room.more`."""
    return module.split(".")[1]


def imported(file: Path) -> Iterator[str]:
    """Modules of ours that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("northchat."))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            if node.module is not None and node.module.split(".")[0] == "northchat":
                for alias in node.names:
                    yield f"{node.module}.{alias.name}"


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_downwards(file: Path) -> None:
    own = file.relative_to(PACKAGE).with_suffix("").parts[0]
    if own == "__init__":
        return
    assert own in ROOMS, "a new room needs a place in the table above and in ARCHITECTURE.md"
    for module in imported(file):
        assert room(module) == own or room(module) in ROOMS[own], f"{own} may not enter {room(module)}"
        if own == "host" and room(module) == "engine":
            assert module.startswith("northchat.engine.protocol"), "host and core share nothing but their protocol"


def test_the_table_itself_has_no_circle() -> None:
    assert set(TopologicalSorter(ROOMS).static_order()) == set(ROOMS)


def test_every_room_exists() -> None:
    found = {file.relative_to(PACKAGE).with_suffix("").parts[0] for file in MODULES} - {"__init__"}
    assert found == set(ROOMS) - {"_megakernel"}


def test_package_files_are_empty() -> None:
    assert [file for file in MODULES if file.name == "__init__.py" and file.read_text().strip()] == []


def test_front_ends_are_light() -> None:
    program = "import importlib, sys\n" + "".join(f"importlib.import_module('northchat.{name}')\n" for name in LIGHT)
    program += f"print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
