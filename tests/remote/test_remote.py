"""Members that a server holds: they answer as the same weights here do, and their faults are clear errors."""

import contextlib
import time

import httpx
import pytest

from adafuse_engine import (
    Engine,
    EngineConfig,
    InvalidArgumentError,
    LoadError,
    MemberConfig,
    MemberError,
    RemoteConfig,
    UnavailableError,
)
from adafuse_engine.members.remote.connection import address_of
from adafuse_engine.members.remote.member import load_remote
from tests.support import tiny
from tests.support.servers import STUBS, SglangStub, VllmStub

PROMPTS = ["The ferry leaves", "你好,世界。今天"]
# All that the tiny models have, so that next to nothing is an estimate: banned tokens are told too, and taken out.
EVERYTHING = 512


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: str(tiny.save(kind, tmp_path_factory.mktemp(kind))) for kind in ("llama", "gemma")}


@contextlib.contextmanager
def served(dialect, folders, kind="llama", **options):
    """A stub that runs, and a config for a member on it."""
    stub = STUBS[dialect](kind, source=folders[kind])
    with stub.running() as root:
        told = {"timeout_s": 20.0, "top_logprobs": EVERYTHING, **options}
        yield stub, MemberConfig(model=f"openai+{root}/v1#tiny", name=f"{kind}0", remote=RemoteConfig(**told))


def members(*configs):
    return [load_remote(c, grammars=False) for c in configs]


@pytest.mark.parametrize("dialect", STUBS)
@pytest.mark.parametrize("settings", [{}, {"preset": "paper"}, {"gate": "any_certain", "threshold": 0.4}], ids=str)
def test_a_remote_ensemble_writes_what_the_same_weights_write_here(dialect, settings, folders):
    settings = {"max_tokens": 16, **settings}
    with Engine(members=[tiny.member("llama"), tiny.member("gemma")]) as engine:
        wanted = engine.generate_batch(PROMPTS, **settings)
    with served(dialect, folders) as (_, a), served(dialect, folders, "gemma") as (_, b):
        with Engine(members=members(a, b)) as engine:
            got = engine.generate_batch(PROMPTS, **settings)
    assert [c.text for c in got] == [c.text for c in wanted]
    for mine, theirs in zip(got, wanted, strict=True):
        for x, y in zip(mine.trace.rounds, theirs.trace.rounds, strict=True):
            assert [c.text for c in x.candidates] == [c.text for c in y.candidates]
            for c, d in zip(x.candidates, y.candidates, strict=True):
                assert c.scores == pytest.approx(d.scores, abs=1e-3, rel=1e-3)


@pytest.mark.parametrize("dialect", STUBS)
def test_local_and_remote_members_mix(dialect, folders):
    with Engine(members=[tiny.member("llama"), tiny.member("gemma")]) as engine:
        wanted = engine.generate(PROMPTS[0], max_tokens=20).text
    with served(dialect, folders, "gemma") as (_, config):
        with Engine(members=[tiny.member("llama"), *members(config)]) as engine:
            assert engine.generate(PROMPTS[0], max_tokens=20).text == wanted


@pytest.mark.parametrize("dialect", STUBS)
def test_a_grammar_holds_a_remote_member_too(dialect, folders):
    with served(dialect, folders) as (_, config), Engine(members=members(config)) as engine:
        answer = engine.generate("Yes or no?", grammar='start: "yes" | "no"', max_tokens=8)
    assert answer.text in ("yes", "no")


def test_the_dialect_and_the_tokenizer_come_from_the_server(folders):
    for dialect in STUBS:
        with served(dialect, folders) as (_, config):
            [member] = members(config)
            assert member.dialect == dialect
            assert member.tokenize("ferry") == tiny.byte_level()("ferry").input_ids


def test_reading_ahead_saves_requests_and_changes_nothing(folders):
    texts, requests = [], []
    for ahead in (1, 8):
        with served("vllm", folders, read_ahead=ahead) as (stub, config):
            with Engine(members=members(config)) as engine:
                stub.requests.clear()
                texts.append(engine.generate(PROMPTS[0], max_tokens=24).text)
                requests.append(len(stub.requests))
    assert texts[0] == texts[1]
    assert requests[1] < requests[0] / 2


def test_candidates_are_scored_in_one_request_that_keeps_the_prefix_cache(folders):
    with served("vllm", folders) as (stub, a), served("vllm", folders, "gemma") as (_, b):
        with Engine(members=members(a, b)) as engine:
            stub.requests.clear()
            engine.generate(PROMPTS[0], max_tokens=4)
    bodies = [body for path, body in stub.requests if path == "/v1/completions"]
    assert any(len(body["prompt"]) > 1 and "logprob_token_ids" in body for body in bodies)
    assert not any("prompt_logprobs" in body or "echo" in body for body in bodies)


def test_a_vllm_without_logprob_token_ids_is_asked_by_prompt(folders):
    with Engine(members=[tiny.member("llama"), tiny.member("gemma")]) as engine:
        wanted = engine.generate(PROMPTS[0], max_tokens=16).text
    with served("vllm", folders) as (a, first), served("vllm", folders, "gemma") as (b, second):
        a.knows_asked = b.knows_asked = False
        with Engine(members=members(first, second)) as engine:
            assert engine.generate(PROMPTS[0], max_tokens=16).text == wanted
    assert any("prompt_logprobs" in body for _, body in a.requests)


# ---- at connect


def test_a_server_whose_scores_do_not_agree_is_refused_and_may_propose_only(folders):
    class Shifted(SglangStub):
        def _meta(self, ids, start, body):
            meta = super()._meta(ids, start, body)
            for row in meta["input_token_logprobs"][1:]:
                row[0] -= 3.0
            return meta

    stub = Shifted("llama", source=folders["llama"])
    with stub.running() as root:
        config = MemberConfig(model=f"openai+{root}/v1", name="shifted")
        with pytest.raises(LoadError, match=r"cannot score.*propose_only"):
            load_remote(config, grammars=False)
        proposing = config.model_copy(update={"remote": RemoteConfig(propose_only=True)})
        with Engine(members=[tiny.member("llama", "here"), load_remote(proposing, grammars=False)]) as engine:
            answer = engine.generate(PROMPTS[0], max_tokens=8)
    scored = [r for r in answer.trace.rounds if r.fused]
    assert all(r.abstained == ("shifted",) for r in scored)
    assert any("shifted" in c.proposers for r in answer.trace.rounds for c in r.candidates)


def test_another_tokenizer_than_the_servers_is_refused(folders):
    with served("vllm", folders) as (_, config), pytest.raises(LoadError, match="other tokens"):
        load_remote(config.model_copy(update={"tokenizer": folders["gemma"]}), grammars=False)


def test_a_server_that_answers_with_texts_for_tokens_is_refused(folders):
    class Texts(VllmStub):
        def _choice(self, index, ids, body):
            choice = super()._choice(index, ids, body)
            choice["logprobs"]["top_logprobs"] = [{"the": -0.1, "a": -2.0}]
            return choice

    stub = Texts("llama", source=folders["llama"])
    with stub.running() as root, pytest.raises(LoadError, match="token ids"):
        load_remote(MemberConfig(model=f"openai+{root}/v1", dialect="vllm"), grammars=False)


def test_nobody_there_is_an_error_at_once():
    start = time.monotonic()
    with pytest.raises(LoadError, match=r"cannot be reached.*check that it runs"):
        load_remote(MemberConfig(model="openai+http://127.0.0.1:9/v1", remote={"retries": 0}))
    assert time.monotonic() - start < 10


def test_a_server_of_no_known_kind_is_refused(folders):
    stub = VllmStub("llama")
    stub.fault = lambda path, body: 404
    with stub.running() as root, pytest.raises(LoadError, match="no known kind of server"):
        load_remote(MemberConfig(model=f"openai+{root}/v1"))


def test_an_unknown_model_names_those_there_are(folders):
    with served("vllm", folders) as (_, config):
        config = config.model_copy(update={"model": config.model.replace("#tiny", "#other"), "dialect": "vllm"})
        with pytest.raises(LoadError, match="'other'; it has 'tiny'"):
            load_remote(config)


@pytest.mark.parametrize(
    ("model", "root", "name"),
    [
        ("openai+http://host:8000/v1#qwen", "http://host:8000", "qwen"),
        ("openai+https://host/api/v1/", "https://host/api", None),
        ("http://127.0.0.1:1", "http://127.0.0.1:1", None),
    ],
)
def test_addresses(model, root, name):
    assert address_of(model) == (root, name)


def test_an_address_without_a_host_is_an_error():
    with pytest.raises(InvalidArgumentError, match="openai\\+http://host:port"):
        address_of("openai+http:///v1")


# ---- while a request runs


def answer_then(fault, after=3):
    """The fault from the given completion on."""
    seen = []

    def fault_at(path, body):
        if path not in ("/v1/completions", "/generate", "/completion"):
            return None
        seen.append(path)
        return fault if len(seen) > after else None

    return fault_at


FAULTS = {
    "status 500": (500, UnavailableError, "answered 500: said by the stub"),
    "status 429": (429, UnavailableError, "answered 429"),
    "status 400": (400, MemberError, "answered 400: said by the stub"),
    "status 401": (401, MemberError, "api_key_env"),
    "dropped": ("drop", UnavailableError, "cannot be reached"),
    "half an answer": (b"half", UnavailableError, "cannot be reached"),
    "no JSON": (b"<html>", UnavailableError, "did not answer in JSON"),
    "no choices": ({"choices": []}, UnavailableError, "choices"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_a_clear_error_and_other_requests_go_on(fault, folders):
    said, kind, match = FAULTS[fault]
    with served("vllm", folders, retries=1, timeout_s=5.0, read_ahead=1) as (stub, config):
        with Engine(members=members(config)) as engine:
            stub.fault = answer_then(said)
            with pytest.raises(kind, match=match):
                engine.generate(PROMPTS[0], max_tokens=16)
            stub.fault = lambda path, body: None
            assert engine.generate(PROMPTS[0], max_tokens=4).text


def test_a_server_that_stalls_is_an_error_within_the_timeout(folders):
    with served("vllm", folders, timeout_s=0.5) as (stub, config), Engine(members=members(config)) as engine:
        stub.fault = lambda path, body: time.sleep(1.5)
        start = time.monotonic()
        with pytest.raises(UnavailableError, match=r"within 0\.5 s"):
            engine.generate(PROMPTS[0], max_tokens=16)
        assert time.monotonic() - start < 1.4


@pytest.mark.parametrize("fault", [503, 429, "drop"])
def test_a_passing_fault_is_asked_again(fault, folders):
    with served("vllm", folders) as (stub, config), Engine(members=members(config)) as engine:
        wanted = engine.generate(PROMPTS[0], max_tokens=8).text
        seen = []

        def once(path, body):
            seen.append(path)
            return fault if len(seen) % 3 == 1 else None

        stub.fault = once
        assert engine.generate(PROMPTS[0], max_tokens=8).text == wanted


def test_it_waits_as_long_as_the_server_says(folders):
    with served("vllm", folders) as (stub, config), Engine(members=members(config)) as engine:
        seen = []
        stub.headers = {"retry-after": "1"}

        def busy_at_first(path, body):
            seen.append((time.monotonic(), body))
            return 429 if len(seen) == 1 else None

        stub.fault = busy_at_first
        engine.generate(PROMPTS[0], max_tokens=1)
    first, again = (at for at, body in seen if body == seen[0][1])
    assert again - first >= 1


@pytest.mark.parametrize("fault", [500, "drop", b"half", b"<html>"])
def test_the_others_go_on_without_a_server_that_failed(fault, folders):
    with served("vllm", folders, "gemma", retries=0) as (stub, config):
        with Engine(members=[tiny.member("llama"), *members(config)]) as engine:
            stub.fault = answer_then(fault)
            answer = engine.generate(PROMPTS[0], max_tokens=24, on_member_failure="continue")
    [failure] = answer.trace.failures
    assert failure.member == "gemma0"
    assert "unavailable" in failure.error
    assert answer.usage.completion_tokens == 24
    before = [r for r in answer.trace.rounds if r.index < failure.round]
    assert "".join(r.text for r in answer.trace.rounds).startswith("".join(r.text for r in before))


def test_a_key_is_sent_and_shows_nowhere(folders, monkeypatch, tmp_path):
    from adafuse_engine import write_config

    monkeypatch.setenv("THE_KEY", "hush-hush")
    with served("vllm", folders) as (stub, config):
        for options in ({"api_key": "hush-hush"}, {"api_key_env": "THE_KEY"}):
            keyed = config.model_copy(update={"remote": RemoteConfig(**options)})
            stub.keys.clear()
            member = load_remote(keyed, grammars=False)
            assert set(stub.keys) == {"Bearer hush-hush"}
            write_config(tmp_path / "c.toml", EngineConfig(members=[keyed]))
            shown = f"{keyed!r} {member!r} {vars(member)!r} {(tmp_path / 'c.toml').read_text()}"
            assert "hush" not in shown
    with pytest.raises(InvalidArgumentError, match="has no OTHER_KEY"):
        load_remote(keyed.model_copy(update={"remote": RemoteConfig(api_key_env="OTHER_KEY")}))


def test_connections_are_closed_with_the_engine(folders, recwarn):
    with served("vllm", folders) as (_, config):
        [member] = members(config)
        with Engine(members=[member]) as engine:
            engine.generate(PROMPTS[0], max_tokens=2)
            [client] = member._connection._clients.values()
            assert isinstance(client, httpx.AsyncClient)
        assert client.is_closed


def test_a_config_file_names_a_remote_member(folders, tmp_path):
    with served("vllm", folders) as (_, config):
        path = tmp_path / "adafuse.toml"
        path.write_text(f'[[members]]\nmodel = "{config.model}"\nname = "far"\n[members.remote]\ntimeout_s = 9.0\n')
        with Engine.from_config(path) as engine:
            assert engine.member_names == ("far",)
            assert engine.generate(PROMPTS[0], max_tokens=4).text
