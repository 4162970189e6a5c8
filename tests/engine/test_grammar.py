"""Answers that follow a grammar, out of a real core with a small random model of North's family."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from north_checkpoint import write_checkpoint
from north_rig import north_tokenizer_file
from peer import Peer, ids, serving

from northchat.chat.north import North
from northchat.chat.north_parser import Marker, marker_ids
from northchat.chat.stream import Accumulator
from northchat.engine.core import Limits
from northchat.engine.cpu import CpuExecutor
from northchat.engine.executor import Row
from northchat.engine.kv_cache import peak_pages
from northchat.engine.protocol import Abort, Sampling, Shutdown, send
from northchat.engine.sampler import sample
from northchat.messages import Message, ToolSpec, Turn
from northchat.messages import Sampling as Asked
from northchat.model.checkpoint import open_weights
from northchat.model.cohere2_moe import Cohere2Moe, load
from northchat.model.tokenizer import Tokenizer

PATH = {"type": "string", "maxLength": 12}
TOOLS = [
    ToolSpec("read", "", {"type": "object", "properties": {"path": PATH}, "required": ["path"]}),
    ToolSpec("mode", "", {"type": "object", "properties": {"to": {"enum": ["fast", "slow"]}}, "required": ["to"]}),
    ToolSpec("now"),
]
LIMITS = Limits(rows=8, chunk=64, mixed_chunk=16, overlap=False, kv_memory=16 << 20, kv_share=1.0)


@dataclass
class Rig:
    tokenizer_json: Path
    tokenizer: Tokenizer
    markers: dict[Marker, int]
    format: North
    model: Cohere2Moe

    @property
    def executor(self) -> CpuExecutor:
        return CpuExecutor(self.model, 4)

    def submit(self, peer: Peer, rid: int, turn: Turn, seed: int, **more: Any) -> list[int]:
        """Returns the prompt."""
        prompt = self.format.render(turn, lambda message: None)
        options = {"grammar": self.format.grammar(turn, prompt), "stop_ids": list(self.format.stop_ids)} | more
        # Thinking of a random model ends at random; it needn't take long.
        bias = {self.markers[Marker.END_THINKING]: 5.0}
        sampling = Sampling(temperature=1.0, top_p=0.95, seed=seed, logit_bias=bias)
        generated = options.pop("answered", [])
        peer.submit(rid, prompt + generated, 1500, sampling, generated=len(generated), **options)
        return prompt

    def message(self, turn: Turn, answer: list[int]) -> Message:
        parser, message = self.format.parser(turn, self.format.render(turn, lambda _: None)), Accumulator()
        for event in (*parser.feed(answer[:-1]), *parser.finish()):
            message.add(event)
        assert answer[-1] in self.format.stop_ids
        return message.message


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("north")
    path = north_tokenizer_file(folder)
    tokenizer = Tokenizer(path)
    # Logits for more ids than the tokenizer has, as real models have them.
    write_checkpoint(folder, vocab_size=tokenizer.vocab_size + 9)
    with torch.inference_mode():
        model = load(open_weights(folder), torch.float32, lambda share: None)
    return Rig(path, tokenizer, marker_ids(tokenizer), North(tokenizer, Asked()), model)


def turn(**more: Any) -> Turn:
    return Turn([Message("user", "Read a.py")], **({"tools": TOOLS, "tool_choice": "required"} | more))


def check_calls(message: Message) -> None:
    assert message.content == ""
    assert message.tool_calls
    for call in message.tool_calls:
        arguments = json.loads(call.arguments)
        match call.name:
            case "read":
                assert list(arguments) == ["path"]
                assert len(arguments["path"]) <= 12
            case "mode":
                assert arguments in ({"to": "fast"}, {"to": "slow"})
            case other:
                assert (other, arguments) == ("now", {})


def test_a_demanded_call_is_valid_every_time(rig: Rig) -> None:
    seeds = range(1, 13)
    with serving(rig.executor, LIMITS, tokenizer_json=rig.tokenizer_json) as (peer, _, codes):
        for seed in seeds:
            rig.submit(peer, seed, turn(), seed)
        got = peer.until_finished(*seeds)
        send(peer.sock, Shutdown())
        assert peer.next() is None
    messages = [rig.message(turn(), ids(got[seed])) for seed in seeds]
    for message in messages:
        check_calls(message)
    assert {outputs[-1].finish for outputs in got.values()} == {"stop"}
    assert len({call.name for message in messages for call in message.tool_calls}) > 1
    assert codes == [0]


def test_named_tool_json_and_free_answers_side_by_side(rig: Rig) -> None:
    named = turn(tool_choice="mode", parallel_tool_calls=False)
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    wanted = {"type": "json_schema", "json_schema": {"schema": schema | {"additionalProperties": False}}}
    structured = turn(tools=[], tool_choice="auto", response_format=wanted)
    free = turn(tool_choice="auto")
    with serving(rig.executor, LIMITS, tokenizer_json=rig.tokenizer_json) as (peer, _, _):
        rig.submit(peer, 9, free, 3)
        alone = peer.until_finished(9)[9]
        rig.submit(peer, 1, named, 1)
        rig.submit(peer, 2, structured, 2)
        rig.submit(peer, 3, free, 3)
        got = peer.until_finished(1, 2, 3)
    (call,) = rig.message(named, ids(got[1])).tool_calls
    assert call.name == "mode"
    answer = rig.message(structured, ids(got[2]))
    assert json.loads(answer.content) in ({"ok": True}, {"ok": False})
    assert ids(got[3]) == ids(alone)


@pytest.mark.parametrize(
    "more",
    [
        {"overlap": True},
        {"rows": 2, "chunk": 7, "mixed_chunk": 3},
        {"tight": True},
    ],
    ids=["overlap", "chunked", "preempted"],
)
def test_the_answer_does_not_depend_on_how_it_was_scheduled(rig: Rig, more: dict[str, Any]) -> None:
    seeds = (1, 2, 3)

    def answers(limits: Limits, memory: int | None) -> list[list[int]]:
        with serving(rig.executor, limits, memory, tokenizer_json=rig.tokenizer_json) as (peer, _, _):
            for seed in seeds:
                rig.submit(peer, seed, turn(reasoning_effort="none"), seed)
            got = peer.until_finished(*seeds)
            preempted = max(step.preemptions for step in peer.steps)
        assert bool(preempted) == (memory is not None)
        return [ids(got[seed]) for seed in seeds]

    plain = answers(LIMITS, None)
    assert all(len(answer) > 60 for answer in plain)
    # Or with pages for the prompt, which they share, and half of what they write.
    full, sliding = rig.executor.groups
    prompt = len(rig.format.render(turn(), lambda _: None))
    memory = (prompt // 4 + 30) * full.page_bytes + 2 * (peak_pages(8, 64, 4) or 0) * sliding.page_bytes
    tight = more.pop("tight", False)
    assert answers(Limits(**(vars(LIMITS) | more)), memory if tight else None) == plain


def test_an_answer_goes_on_from_any_of_its_ids(rig: Rig) -> None:
    with serving(rig.executor, LIMITS, tokenizer_json=rig.tokenizer_json) as (peer, _, _):
        rig.submit(peer, 1, turn(), 5)
        answer = ids(peer.until_finished(1)[1])
        cuts = range(1, len(answer) - 1, len(answer) // 6)
        for cut in cuts:
            rig.submit(peer, 100 + cut, turn(), 6, answered=answer[:cut])
        got = peer.until_finished(*(100 + cut for cut in cuts))
    for cut in cuts:
        check_calls(rig.message(turn(), answer[:cut] + ids(got[100 + cut])))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"grammar": "start: %json {"}, ""),
        ({"grammar": f'start: %json {{"multipleOf": "{"a" * 97}üüüü"}}'}, ""),
        ({"grammar": f'start: %json {{"multipleOf": "{"a" * 98}üüüü"}}'}, ""),
        ({"grammar": 'start: "a"', "answered": [5, 5]}, "can't be followed"),
    ],
)
def test_what_can_not_be_followed_ends_in_one_line(rig: Rig, more: dict[str, Any], message: str) -> None:
    with serving(rig.executor, LIMITS, tokenizer_json=rig.tokenizer_json) as (peer, _, _):
        rig.submit(peer, 1, turn(), 1, **more)
        (output,) = peer.until_finished(1)[1]
        assert output.finish == "error"
        assert message in output.message
        assert output.message
        assert "\n" not in output.message
        rig.submit(peer, 2, turn(), 1)
        assert peer.until_finished(2)[2][-1].finish == "stop"


def test_without_a_tokenizer_only_grammars_are_refused(rig: Rig) -> None:
    with serving(rig.executor, LIMITS) as (peer, _, _):
        rig.submit(peer, 1, turn(), 1)
        rig.submit(peer, 2, turn(tool_choice="auto"), 1)
        got = peer.until_finished(1, 2)
    assert got[1][-1].finish == "error"
    assert "without a tokenizer" in got[1][-1].message
    assert got[2][-1].finish in ("stop", "length")


def test_a_request_can_be_aborted_before_its_grammar_is_there(rig: Rig) -> None:
    with serving(rig.executor, LIMITS, tokenizer_json=rig.tokenizer_json) as (peer, _, _):
        rig.submit(peer, 1, turn(), 1)
        send(peer.sock, Abort(1))
        rig.submit(peer, 2, turn(), 2)
        got = peer.until_finished(1, 2)
    assert got[1][-1].finish == "abort"
    assert got[2][-1].finish == "stop"
    assert (peer.steps[-1].running, peer.steps[-1].waiting) == (0, 0)


# ---- the mask in the sampler ----


def masked(*ids: int, length: int) -> bytes:
    return sum(1 << token for token in ids).to_bytes(length, "little")


def test_a_mask_leaves_the_allowed_ids_their_relative_shares() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 0.5, 4.0, 0.0, 1.5, 0.2, 5.0, 9.0]])
    row: Callable[..., Row] = lambda **more: Row(0, [0], 0, ([0],), True, **more)  # noqa: E731
    mask = masked(1, 2, 8, length=2)
    # Without bits for id 9 it may not come, whatever its score.
    assert sample(logits, [row(sampling=Sampling(), mask=mask[:1])])[0][0] == 2
    assert sample(logits, [row(sampling=Sampling(), mask=mask)])[0][0] == 8
    drawn = 4000
    rows = [row(sampling=Sampling(temperature=2.0, seed=seed), mask=mask) for seed in range(drawn)]
    got = torch.bincount(torch.tensor([token for token, _ in sample(logits.expand(drawn, -1), rows)]), minlength=10)
    expected = torch.zeros(10)
    expected[[1, 2, 8]] = (logits[0, [1, 2, 8]] / 2).softmax(0)
    assert (got / drawn - expected).abs().max() < 0.04
    assert not got[expected == 0].any()
