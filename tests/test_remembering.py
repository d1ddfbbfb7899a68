"""Members that remember what their models said."""

import pytest

from adafuse_engine import Engine
from adafuse_engine.members.remembering import Memory, RememberingMember
from tests.support import tiny

PROMPTS = ["The ferry", "One two three"]
SETTINGS = [
    {},
    {"preset": "paper"},
    {"mix": "arithmetic", "branches": 5},
    {"gate": "any_certain", "threshold": 0.02, "catch_up": "lazy"},
    {"fusion": "bits_per_byte", "max_words": 1, "confidence": "entropy"},
    {"temperature": 0.8, "seed": 3},
]


class Counting:
    """A member that counts how often its model is asked to read a prompt."""

    def __init__(self, member):
        self._member = member
        self.begun = 0

    def __getattr__(self, name):
        return getattr(self._member, name)

    async def begin(self, *args):
        self.begun += 1
        return await self._member.begin(*args)


@pytest.fixture(scope="module")
def members():
    return [tiny.member("llama", "a", 1), tiny.member("gemma", "b", 2)]


def answers(members, weights=None):
    with Engine(members=members, weights=weights) as engine:
        return [
            [c.text for c in engine.generate_batch(PROMPTS, max_tokens=12, **settings)] for settings in SETTINGS
        ]


def test_what_is_remembered_changes_no_answer_and_is_computed_once(members, tmp_path):
    plain = answers(members, [1, 2])
    counting = [Counting(m) for m in members]
    memory = Memory(tmp_path)
    assert answers([RememberingMember(m, memory) for m in counting], [1, 2]) == plain
    first = [m.begun for m in counting]
    assert answers([RememberingMember(m, memory) for m in counting], [1, 2]) == plain
    # In a process of its own, from the folder.
    assert answers([RememberingMember(m, Memory(tmp_path)) for m in counting], [1, 2]) == plain
    assert [m.begun for m in counting] == first


def test_usage_counts_forwards_as_if_nothing_were_remembered(members):
    memory = Memory()

    def forwards(those):
        with Engine(members=those) as engine:
            usage = engine.generate(PROMPTS[0], max_tokens=12).usage
            return [(m.forward_passes, m.tokens_processed) for m in usage.members]

    plain = forwards(members)
    remembering = [RememberingMember(m, memory) for m in members]
    assert forwards(remembering) == plain
    assert forwards(remembering) == plain


def test_a_line_cut_by_a_kill_is_computed_again(members, tmp_path):
    plain = answers(members)
    answers([RememberingMember(m, Memory(tmp_path)) for m in members])
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:-40])
    assert answers([RememberingMember(m, Memory(tmp_path)) for m in members]) == plain


def test_grammars_pass_the_memory_by(members, tmp_path):
    with Engine(members=[RememberingMember(m, Memory(tmp_path)) for m in members]) as engine:
        assert engine.generate("x", grammar='start: "yes" | "no"').text in ("yes", "no")
    assert not list(tmp_path.iterdir())
