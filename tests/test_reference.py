"""The engine equals the reference decoder, and one member alone equals transformers, in float32."""

import codecs
import itertools

import pytest
import torch

from adafuse_engine import DecodingConfig, Engine
from tests.reference.decoder import Reference, decode
from tests.support import tiny

PROMPTS = [
    "The ferry leaves",
    "def add(a, b):\n\treturn a",
    "One, two,\n\n  three  ",
    "你好,世界。今天",
    "🎉 1234567890 Café",
]

TINY = {
    "one": ["gemma"],
    "two": ["llama", "gemma"],
    "two alike": ["llama", "llama"],
    "three": ["mistral", "gemma", "llama"],
    "four": ["gpt2", "llama", "gemma", "mistral"],
}

# Threshold 0.4, for random models are seldom surer.
SETTINGS = {
    "default": {},
    "paper": {"preset": "paper"},
    "gated": {"gate": "any_certain", "confidence": "max_prob"},
    "gated lazily": {"gate": "any_certain", "catch_up": "lazy"},
    "vote": {"fusion": "vote", "mix": "auto", "confidence": "entropy", "threshold": 0.6},
    "vote, geometric": {"fusion": "vote", "mix": "geometric"},
    "bits per byte": {"fusion": "bits_per_byte", "mix": "arithmetic", "scaling": "temperature"},
    "mean nll, arithmetic": {"fusion": "mean_nll", "mix": "arithmetic", "scaling": "nucleus"},
    "arithmetic": {"mix": "arithmetic", "branches": 5, "max_words": 1},
    "no word ends": {"word_end_mass": False, "scaling": "entropy_nucleus"},
    "drawn": {"temperature": 1.0, "scaling": "temperature", "scaling_temperature": 2.0},
    "drawn, mean nll": {"temperature": 0.5, "fusion": "mean_nll"},
    "short words": {"max_word_tokens": 2},
}


def text_of(ledger: bytes) -> str:
    """As the engine shows it: whole characters, a cut one at the end left out."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(ledger)


def references(members, weights, prompt):
    return [
        Reference(m.model.runner.model, m.model.vocabulary, m.prompt_ids(prompt), w)
        for m, w in zip(members, weights, strict=True)
    ]


@pytest.fixture(scope="module")
def tiny_engines():
    made = {}

    def get(kinds):
        if kinds not in made:
            seeds = itertools.count()
            members = [tiny.member(kind, f"m{i}", next(seeds)) for i, kind in enumerate(TINY[kinds])]
            weights = [1.0 + 0.3 * i for i in range(len(members))]
            made[kinds] = members, weights, Engine(members=members, weights=weights)
        return made[kinds]

    yield get
    for _, _, engine in made.values():
        engine.close()


# Every rule for two and three members; the presets and the gates for any number.
CASES = [
    (kinds, settings)
    for kinds in TINY
    for settings in SETTINGS
    if kinds in ("two", "three") or settings in ("default", "paper", "gated", "gated lazily")
]


@pytest.mark.parametrize(("kinds", "settings"), CASES)
def test_the_engine_equals_the_reference_on_tiny_models(tiny_engines, kinds, settings):
    members, weights, engine = tiny_engines(kinds)
    options = {"threshold": 0.4, "max_tokens": 12, "seed": 7, **SETTINGS[settings]}
    # All prompts for the presets; for the rest one or two, by turns.
    mine = PROMPTS if settings in ("default", "paper") and len(members) < 4 else PROMPTS[len(settings) % 4 :][:2]
    for prompt in mine:
        expected = decode(references(members, weights, prompt), DecodingConfig(**options), seed=7)
        assert engine.generate(prompt, **options).text == text_of(expected)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kinds", ["two", "three"])
def test_drafting_and_early_decisions_change_no_round(tiny_engines, kinds, settings):
    _, _, engine = tiny_engines(kinds)
    options = {"threshold": 0.4, "max_tokens": 16, "seed": 7, **SETTINGS[settings]}
    for prompt in PROMPTS[len(settings) % 4 :][:2]:
        roads = [
            engine.generate(prompt, drafting=drafting, early_decisions=early, **options)
            for drafting, early in itertools.product((False, True), repeat=2)
        ]
        for road in roads[1:]:
            assert road.text == roads[0].text
            assert [(r.text, r.words, r.end) for r in road.trace.rounds] == [
                (r.text, r.words, r.end) for r in roads[0].trace.rounds
            ]


def test_a_permutation_of_members_changes_nothing(tiny_engines):
    members, weights, engine = tiny_engines("three")
    with Engine(members=members[::-1], weights=weights[::-1]) as reversed_engine:
        for prompt in PROMPTS:
            # Counted in bytes of the text, for the first member's tokens differ.
            one = engine.generate(prompt, threshold=0.4, max_tokens=10).text
            two = reversed_engine.generate(prompt, threshold=0.4, max_tokens=20).text
            assert two.startswith(one[:5])


def greedy(member, ids, tokens):
    """What transformers itself writes: the new ids, the end token left out.

    Random models would also write special tokens, which a member never does.
    """
    model, banned = member.model.runner.model, sorted(member.model.vocabulary.banned)
    with torch.no_grad():
        out = model.generate(
            torch.tensor([ids]),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            suppress_tokens=banned or None,
        )
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return [i for i in out[0, len(ids) :].tolist() if i not in ends]


@pytest.mark.parametrize("kind", ["llama", "gemma", "mistral", "gpt2", "mamba"])
@pytest.mark.parametrize("options", [{}, {"preset": "paper"}, {"gate": "any_certain", "catch_up": "lazy"}])
def test_one_member_alone_equals_transformers_greedy(kind, options):
    for seed in range(2):
        member = tiny.member(kind, seed=seed)
        with Engine(members=[member]) as engine:
            vocabulary = member.model.vocabulary
            for prompt in PROMPTS:
                ids = member.prompt_ids(prompt)
                expected = greedy(member, ids, 24)
                done = engine.generate(prompt, max_tokens=24, threshold=0.4, **options)
                assert done.text == text_of(b"".join(map(vocabulary.bytes_of, expected)))
                assert done.usage.completion_tokens == len(expected)


def test_the_same_member_twice_equals_it_once():
    shared = tiny.local_model("llama", 3)
    twins = [tiny.LocalMember(tiny.MemberConfig(model="m", name=n), shared, progress=False) for n in "ab"]
    with Engine(members=twins) as both, Engine(members=[tiny.member("llama", "alone", 3)]) as alone:
        for prompt in PROMPTS:
            assert both.generate(prompt, max_tokens=20).text == alone.generate(prompt, max_tokens=20).text


def test_every_members_committed_tokens_spell_the_ledger(tiny_engines, monkeypatch):
    from adafuse_engine.members.session import TokenSession

    seen = []
    commit = TokenSession.commit

    async def spy(self, words):
        await commit(self, words)
        seen.append((self, self.committed))

    monkeypatch.setattr(TokenSession, "commit", spy)
    _, _, engine = tiny_engines("four")
    done = engine.generate(PROMPTS[1], max_tokens=30, threshold=0.4)
    ledger = "".join(r.text for r in done.trace.rounds)
    finals = {id(s): data for s, data in seen}
    assert len(finals) == 4
    assert len(set(finals.values())) == 1
    assert ledger.startswith(text_of(next(iter(finals.values()))))


# ---- the packaged models

QUESTIONS = [
    "Question: What is the capital of France?\nAnswer:",
    "The opposite of hot is",
    "def fibonacci(n):\n\tif n < 2:\n\t\treturn n\n",
    "Q: 12 + 30 = ?\nA:",
    "Once upon a time, in a small village by the sea,",
    "你好!请问",
    "Translate to German: Good morning!\n\n",
    "- apples\n- pears\n- ",
    "🎉 Happy birthday to",
    '{"name": "Anna", "age":',
    "The three primary colours are red,",
    "Water boils at",
    "Dear Sir or Madam,\n\n",
    "SELECT name FROM users WHERE",
    "The chemical symbol for gold is",
    "Roses are red,\nviolets are",
    "<html>\n  <body>\n    <p>",
    "In 1969, the first man",
    "List:\t1\t2\t3\t",
    "My favourite food is",
]


@pytest.fixture(scope="module")
def packaged():
    with Engine.from_models(["bundled:smollm2-135m-instruct", "bundled:gemma-3-270m"], progress=False) as engine:
        yield engine


@pytest.mark.real_models
@pytest.mark.parametrize("question", QUESTIONS)
def test_the_engine_equals_the_reference_on_the_packaged_models(packaged, question):
    known = [{} for _ in packaged._members]
    for preset in ("default", "paper"):
        options = {"preset": preset, "max_tokens": 4}
        members = references(packaged._members, [1, 1], question)
        for member, rows in zip(members, known, strict=True):
            member.known = rows
        expected = decode(members, DecodingConfig(**options))
        assert packaged.generate(question, **options).text == text_of(expected)


@pytest.mark.real_models
@pytest.mark.timeout(600)
@pytest.mark.parametrize("index", [0, 1], ids=["smollm2", "gemma"])
def test_one_packaged_member_alone_equals_transformers_greedy(packaged, index):
    member = packaged._members[index]
    vocabulary = member.model.vocabulary
    with Engine(members=[member]) as alone:
        for question in QUESTIONS:
            expected = greedy(member, member.prompt_ids(question), 12)
            done = alone.generate(question, max_tokens=12)
            assert done.text == text_of(b"".join(map(vocabulary.bytes_of, expected)))


@pytest.mark.real_models
def test_no_prompt_token_is_processed_twice(packaged):
    prompt = ("The harbour ferry leaves at seven. " * 200)[:6400] + "\nIt"
    usage = packaged.generate(prompt, max_tokens=30).usage
    for member in usage.members:
        assert member.prompt_tokens > 1000
        # Beyond the prompt, only what the rounds fed: at most a few spans of candidates per token.
        assert member.tokens_processed - member.prompt_tokens < 30 * 3 * 8
        assert member.tokens_processed < 2 * member.prompt_tokens
