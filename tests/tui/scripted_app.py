"""The app as a process of its own, for tests that look at the bytes a terminal gets: argv[1] is what the model says."""

import sys

from scripted_client import READY, Script, answer

from northchat.client import Health
from northchat.config import Config
from northchat.messages import Reasoning, Text
from northchat.tui import app as module
from northchat.tui.app import ChatApp

text = sys.argv[1]
health = Health("ready", model=READY.model, device=text, notes=[text], can_call_tools=False)
script = Script([[Reasoning(text), Text(text), *answer("\n\nthe end")]], [[health]])


class FaultyApp(ChatApp):
    def action_repaint(self) -> None:
        raise RuntimeError("a fault")


module.ChatApp = lambda config, prompt: FaultyApp(  # type: ignore[assignment, misc]
    config, prompt, locate=script.locate, make_client=script.client
)
sys.exit(module.run(Config(model=READY.model)))
