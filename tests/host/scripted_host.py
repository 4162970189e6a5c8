"""A host whose model is a script for scripted_core.py; otherwise as host.main. Needs this directory in PYTHONPATH."""

import sys
from collections.abc import Callable
from pathlib import Path

from scripted_core import ByteTokenizer

from northchat.host import main, turns
from northchat.messages import Sampling
from northchat.model.catalog import Model, ModelFiles


class ScriptedModel(Model):
    def fetch(self, progress: Callable[[str, int, int], None]) -> ModelFiles:
        progress("downloading", 1, 2)
        config = {"eos_token_id": 258}
        return ModelFiles(self.path, self.path, config, _template(self.path))


def _template(path: Path) -> str | None:
    """A chat template beside the script; with one, the model can call tools."""
    template = path.with_suffix(".jinja")
    return template.read_text() if template.exists() else None


def resolve(name: str) -> Model:
    path = Path(name)
    tools = _template(path) is not None
    return ScriptedModel("scripted", path, "hf", "template" if tools else "chatml", tools, Sampling(temperature=0.0))


def parts() -> main.Parts:
    core = Path(__file__).with_name("scripted_core.py")
    return main.Parts(resolve, ByteTokenizer, (sys.executable, str(core)))


if __name__ == "__main__":
    # Tests wait for these.
    main.GRACE, main.PREDECESSOR, turns.KEEP_ALIVE = 0.6, 1.0, 0.1
    sys.exit(main.main(parts=parts))
