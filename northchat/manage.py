"""Subcommands that look after what runs and what is set: engine, doctor, logs, config."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from northchat import launch, paths, sanitize


def engine(argv: list[str]) -> int:
    cli = argparse.ArgumentParser("northchat engine", description="Engines that run in the background.")
    commands = cli.add_subparsers(dest="command", required=True)
    commands.add_parser("status", help="which engines run, for whom")
    commands.add_parser("stop", help="end engines").add_argument(
        "model", nargs="?", metavar="MODEL", help="only those of this model"
    )
    options = cli.parse_args(argv)
    try:
        hosts = launch.list_hosts()
        if options.command == "stop":
            return _stop([host for host in hosts if options.model in (None, host.info.model)])
    except (launch.LaunchError, paths.PathError) as error:
        print(f"northchat: {error}", file=sys.stderr)
        return 1
    for host in hosts:
        health = host.health
        state = health.get("status", "does not answer")
        users = f"{health.get('clients', 0)} attached, {health.get('running', 0)} running" if health else ""
        addresses = filter(None, [host.info.serving, *health.get("serving", [])])
        places = ", ".join(f"http://{address}/v1" for address in addresses)
        facts = (host.info.model, host.info.device, f"process {host.info.pid}", state, users, places)
        print(" · ".join(fact for fact in facts if fact))
    if not hosts:
        print("no engine is running")
    return 0


def _stop(hosts: list[launch.HostStatus]) -> int:
    for host in hosts:
        launch.stop_host(host)
        print(f"{host.info.model} on {host.info.device} stopped")
    if not hosts:
        print("no such engine is running")
    return 0


def doctor(argv: list[str]) -> int:
    argparse.ArgumentParser("northchat doctor", description="Checks what northchat needs.").parse_args(argv)
    from northchat import doctor

    return doctor.doctor()


def logs(argv: list[str]) -> int:
    cli = argparse.ArgumentParser("northchat logs", description="The end of the newest log.")
    cli.add_argument("-n", type=int, default=50, metavar="LINES", help="how many lines (default 50)")
    cli.add_argument("--path", action="store_true", help="print where the logs lie")
    options = cli.parse_args(argv)
    folder = paths.state_dir() / "log"
    files = sorted(folder.glob("*.log"), key=lambda file: file.stat().st_mtime)
    if options.path:
        print(folder)
    elif not files:
        print(f"there are no logs in {folder} yet", file=sys.stderr)
    else:
        print(f"{files[-1]}:", file=sys.stderr)
        for line in _tail(files[-1], max(options.n, 0)):
            print(sanitize.clean(line))
    return 0


def _tail(file: Path, lines: int) -> list[str]:
    return file.read_text("utf-8", "replace").splitlines()[-lines:] if lines else []


def config(argv: list[str]) -> int:
    from northchat import config as settings

    cli = argparse.ArgumentParser("northchat config", description="Settings.")
    commands = cli.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="all settings")
    show.add_argument("--origin", action="store_true", help="with where each comes from")
    commands.add_parser("path", help="where config.toml lies")
    options = cli.parse_args(argv)
    if options.command == "path":
        print(settings.path())
        return 0
    try:
        current = settings.load()
    except settings.ConfigError as error:
        print(f"northchat: {error}", file=sys.stderr)
        return 2
    rows = []
    for key in settings.KEYS:
        value = getattr(current, key)
        shown = "(hidden)" if value and key in settings.SECRET else "" if value is None else str(value)
        rows.append((key, sanitize.clean(shown), current.origins[key]))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for key, shown, origin in rows:
        line = f"{key:{widths[0]}}  {shown:{widths[1]}}" + (f"  {origin}" if options.origin else "")
        print(line.rstrip())
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "engine": engine,
    "doctor": doctor,
    "logs": logs,
    "config": config,
}
