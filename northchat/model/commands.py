"""`northchat models list|path|rm|pull`."""

import argparse
import shutil
import sys
import time
from pathlib import Path

from northchat.model import catalog
from northchat.model.fetch import Progress
from northchat.model.weights import ModelError


def cli(argv: list[str]) -> int:
    """Run the subcommand; returns the exit code."""
    parser = argparse.ArgumentParser("northchat models", description="Models on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="models known by name and those on this machine, with sizes")
    for name, text in (
        ("path", "print where a model lies"),
        ("rm", "delete a model from this machine"),
        ("pull", "download a model now rather than at first use"),
    ):
        commands.add_parser(name, help=text).add_argument("model", help="a name that `northchat models list` shows")
    arguments = parser.parse_args(argv)
    try:
        match arguments.command:
            case "list":
                _list()
            case "path":
                _path(arguments.model)
            case "rm":
                _remove(arguments.model)
            case "pull":
                _pull(arguments.model)
    except ModelError as error:
        print(f"northchat: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


def _list() -> None:
    rows = [("NAME", "SIZE", "STATE", "CHAT FORMAT", "TOOLS")]
    broken = []
    for name in catalog.names():
        try:
            model = catalog.resolve(name)
        except ModelError as error:
            broken.append(str(error))
            continue
        size = disk_bytes(model.path) if model.present else model.source.bytes if model.source else 0
        state = "on this machine" if model.present else "fetched at first use"
        rows.append((name, human_bytes(size), state, model.format, "yes" if model.can_call_tools else "no"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for line in broken:
        print(f"northchat: {line}", file=sys.stderr)
    folder = catalog.models_dir()
    print(f"\n{folder}: {human_bytes(disk_bytes(folder))} used, {human_bytes(free_bytes(folder))} free")


def _path(name: str) -> None:
    model = catalog.resolve(name)
    if not model.present:
        raise ModelError(f"{name} is not on this machine; run: northchat models pull {name}")
    print(model.path)


def _remove(name: str) -> None:
    folder = catalog.models_dir() / name
    if not name or "/" in name or name in (".", "..") or not folder.is_dir():
        raise ModelError(f"there is no {name!r} in {catalog.models_dir()}; northchat models list shows what is")
    size = disk_bytes(folder)
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise ModelError(f"can't delete {error.filename or folder}: {error.strerror}") from error
    print(f"{name} deleted, {human_bytes(size)} freed")


def _pull(name: str) -> None:
    model = catalog.resolve(name)
    show = _bar(name) if sys.stderr.isatty() else _quiet
    try:
        files = model.fetch(show)
    finally:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    print(f"{name}: {human_bytes(disk_bytes(files.path))} in {files.path}")


def _quiet(what: str, done: int, total: int) -> None:
    pass


def _bar(name: str) -> Progress:
    start = time.monotonic()

    def show(what: str, done: int, total: int) -> None:
        seconds = time.monotonic() - start
        rate = f", {human_bytes(int(done / seconds))}/s" if what == "downloading" and done and seconds > 0.5 else ""
        filled = 16 * done // max(total, 1)
        line = f"{name}: {what} [{'#' * filled}{'.' * (16 - filled)}] {human_bytes(done)} of {human_bytes(total)}{rate}"
        line = line[: shutil.get_terminal_size().columns - 1]  # a wrapped line can't be drawn over
        print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)

    return show


def disk_bytes(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    if not path.is_dir():
        return path.stat().st_size if path.exists() else 0
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def free_bytes(path: Path) -> int:
    """Free bytes on the disk where the path lies or will lie."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def human_bytes(size: int) -> str:
    """Decimal units, as disks and downloads are measured."""
    if size < 1000:
        return f"{size} B"
    value = size / 1000
    for unit in ("kB", "MB"):
        if value < 1000:
            return f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"
