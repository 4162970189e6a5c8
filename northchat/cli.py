"""The command line: arguments to a front end, and one clear line for whatever can't be done.

Everything but the arguments is imported when it is needed, so that `--version` and the first paint don't wait for it.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from northchat.config import Config

STDIN_PATIENCE_S = 3.0
_EPILOG = """\
subcommands (northchat SUBCOMMAND --help):
  models list|pull|path|rm    models on this machine
  engine status|stop          engines that run in the background
  doctor                      what this machine has and what would be missing
  logs                        what an engine wrote last
  config show                 settings, with --origin where each comes from
  completion bash|zsh|fish    shell completion

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 cut off at the token limit, 130 interrupted.
With -p, piped standard input is appended to TEXT; `-p -` takes all of the question from there.
"""


class UsageError(Exception):
    """The command line can't be carried out as it is; one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code. Never raises, and never shows a traceback unless --debug asked for it."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments and (subcommand := _subcommands().get(arguments[0])):
            return subcommand(arguments[1:])
        return _front_end(parser().parse_args(arguments))
    except UsageError as error:
        print(f"northchat: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Who reads has seen enough; what is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except OSError as error:
        # A folder that can't be written, a full disk: the name and the reason say what to do.
        print(f"northchat: {error.filename or 'input or output'}: {error.strerror or error}", file=sys.stderr)
        return 1
    except Exception as error:
        return _internal_error(error, "--debug" in arguments)


def parser() -> argparse.ArgumentParser:
    cli = argparse.ArgumentParser(
        "northchat",
        description="Chat and coding assistant for the terminal, with its own inference engine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    cli.add_argument("prompt", nargs="?", metavar="PROMPT", help="first question of the conversation")
    cli.add_argument("-p", dest="text", metavar="TEXT", help="print the answer to TEXT and leave")
    cli.add_argument(
        "--output-format", choices=("text", "json", "stream-json"), help="of -p: text (default), json, stream-json"
    )
    cli.add_argument("--plain", action="store_true", help="line mode: no full screen, nothing redrawn")
    cli.add_argument("--model", metavar="NAME|PATH", help="model name, GGUF file or directory; or a server's model")
    cli.add_argument("--base-url", metavar="URL", help="use an OpenAI-compatible server; `local`: our own engine")
    cli.add_argument("--device", choices=("cpu", "cuda"), help="where our own engine runs")
    cli.add_argument("-C", dest="directory", metavar="DIR", help="work in DIR")
    cli.add_argument("--serve", action="store_true", help="serve the model to editors and scripts over HTTP")
    cli.add_argument("--host", metavar="ADDRESS", help="of --serve (default 127.0.0.1)")
    cli.add_argument("--port", type=int, help="of --serve (default 8642)")
    cli.add_argument("--api-key", metavar="KEY", help="that clients of --serve must send; better in NORTHCHAT_API_KEY")
    cli.add_argument("--debug", action="store_true", help="write a log of all requests; show tracebacks")
    cli.add_argument("-V", "--version", action=_Version, help="print the version and leave")
    return cli


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, cli: argparse.ArgumentParser, *_: object) -> NoReturn:
        from northchat import version

        print(f"northchat {version.current()}")
        cli.exit()


def _front_end(options: argparse.Namespace) -> int:
    _check(options)
    if options.directory is not None:
        try:
            os.chdir(options.directory)
        except OSError as error:
            raise UsageError(f"-C {options.directory}: {error.strerror}") from None
    from northchat import config

    flags = {name: getattr(options, name) for name in ("model", "base_url", "device", "host", "port")}
    try:
        settings = config.load(flags | {"serve_key": options.api_key})
    except config.ConfigError as error:
        raise UsageError(str(error)) from None
    if options.debug:
        _log_requests()
    if options.serve:
        return _serve(settings)
    if options.text is not None:
        prompt = _question(options.text)
        _confirm(settings)
        from northchat import headless

        return headless.run(settings, prompt, options.output_format or "text")
    return _converse(settings, options)


def _check(options: argparse.Namespace) -> None:
    """Raises UsageError for options that don't go together."""
    if options.text is None and options.output_format:
        raise UsageError("--output-format belongs to -p TEXT")
    if options.text is not None and options.prompt is not None:
        raise UsageError("give the question once: either -p TEXT or PROMPT; quote it if it has blanks")
    if options.serve:
        if options.text is not None or options.prompt is not None or options.plain or options.base_url:
            raise UsageError("--serve goes with --model, --device, --host, --port and --api-key only")
    elif given := next((name for name in ("host", "port", "api_key") if getattr(options, name) is not None), None):
        raise UsageError(f"--{given.replace('_', '-')} belongs to --serve")


def _converse(settings: "Config", options: argparse.Namespace) -> int:
    plain = options.plain or os.environ.get("TERM") == "dumb" or bool(os.environ.get("ACCESSIBLE"))
    if not plain and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("this is no terminal; use -p TEXT for one answer, -p - for a question from standard input")
    if plain:
        _confirm(settings)
        from northchat import repl

        return repl.run(settings, options.prompt)
    from northchat.tui import app

    return app.run(settings, options.prompt)


def _serve(settings: "Config") -> int:
    from northchat.agent import backend

    try:
        backend.check_device(settings)
    except backend.BackendError as error:
        print(f"northchat: {error}", file=sys.stderr)
        return 1
    from northchat import launch, lend
    from northchat.host.main import Settings, serve

    model, device = settings.model or backend.DEFAULT_MODEL, settings.device or "cpu"
    try:
        while engine := launch.Launch(model, device).running():
            code = lend.run(engine, model, settings.host, settings.port, settings.serve_key)
            if code is not None:
                return code
    except launch.LaunchError as error:
        print(f"northchat: {error}", file=sys.stderr)
        return 1
    return serve(Settings(model, device, serve=(settings.host, settings.port), api_key=settings.serve_key))


def _question(text: str) -> str:
    """TEXT with what is piped in. Raises UsageError when nothing is asked."""
    piped = "" if sys.stdin is None or sys.stdin.isatty() else _piped(patient=text == "-")
    if text == "-" and sys.stdin is not None and sys.stdin.isatty():
        piped = sys.stdin.read()
    question = "\n\n".join(part for part in ("" if text == "-" else text, piped.rstrip()) if part.strip())
    if not question:
        raise UsageError("the question is empty")
    return question


def _piped(*, patient: bool) -> str:
    """All of standard input; but a pipe in which nothing comes for a while is taken for one that was left open."""
    import select

    if not patient and not select.select([sys.stdin], [], [], STDIN_PATIENCE_S)[0]:
        print("northchat: nothing came on standard input; going on without it", file=sys.stderr)
        return ""
    return sys.stdin.buffer.read().decode("utf-8", "replace")


def _confirm(settings: "Config") -> None:
    """Ask once before a conversation goes to a server that only the environment names. Raises UsageError."""
    from northchat.agent import backend

    if not backend.needs_confirmation(settings):
        return
    where = f"OPENAI_BASE_URL sends what you write to {settings.base_url}"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"{where}; if you want that, pass --base-url, or start northchat once and agree")
    print(f"{where}. Go on, now and from now on? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("not confirmed; --base-url local uses the engine of this machine")
    backend.confirm(settings)


def _subcommands() -> dict[str, Callable[[list[str]], int]]:
    def models(argv: list[str]) -> int:
        from northchat.model import commands

        return commands.cli(argv)

    def manage(name: str) -> Callable[[list[str]], int]:
        def run(argv: list[str]) -> int:
            from northchat import manage

            return manage.COMMANDS[name](argv)

        return run

    managed = {name: manage(name) for name in ("engine", "doctor", "logs", "config")}
    return {"models": models, **managed, "completion": _completion}


def _completion(argv: list[str]) -> int:
    from northchat import completion

    cli = argparse.ArgumentParser("northchat completion", description="A completion script for your shell.")
    cli.add_argument("shell", choices=completion.SHELLS)
    print(completion.script(cli.parse_args(argv).shell, parser()), end="")
    return 0


def _log_requests() -> None:
    import logging

    from northchat import paths

    file = paths.state_dir() / "log" / "front-end.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=file, level=logging.DEBUG, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def _internal_error(error: Exception, debug: bool) -> int:
    import traceback

    if debug:
        traceback.print_exception(error)
    print(f"northchat: internal error: {error!r}; run it with --debug and report what that shows", file=sys.stderr)
    return 1
