"""Members in Ray actors: they answer as the same weights do here, and outlive the death of an actor."""

import os
import signal
import time

import pytest

from adafuse_engine import (
    ContextWindowError,
    Engine,
    EngineConfig,
    LoadError,
    MemberConfig,
    RemoteConfig,
    UnavailableError,
)
from adafuse_engine.members import ray as ray_members
from adafuse_engine.members.pool import load_members
from tests.support import tiny

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(300)
PROMPTS = ["The ferry leaves", "你好,世界。今天"]


@pytest.fixture(scope="module")
def cluster():
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return [str(tiny.save(kind, tmp_path_factory.mktemp(kind))) for kind in ("llama", "gemma")]


@pytest.fixture(scope="module")
def actors(cluster, folders):
    configs = [
        MemberConfig(model=f, name=n, placement="ray", remote=RemoteConfig(timeout_s=90), dtype="float32")
        for f, n in zip(folders, ("llama0", "gemma0"), strict=True)
    ]
    members = load_members(EngineConfig(members=configs, progress=False, prepare_grammars=False))
    yield members
    for member in members:
        member.close()


@pytest.fixture
def engine(actors):
    with Engine(members=actors) as made:
        yield made


@pytest.fixture
def here():
    with Engine(members=[tiny.member("llama"), tiny.member("gemma")]) as made:
        yield made


def kill(member):
    """As a machine that fails: nothing is told to anybody."""
    _, pid = ray.get(member.actor.facts.remote())
    os.kill(pid, signal.SIGKILL)


def sessions(member):
    return ray.get(member.actor.sessions.remote())


def told(completion):
    """Texts and choices of a trace."""
    return [(r.text, [(c.text, c.proposers) for c in r.candidates], r.winner) for r in completion.trace.rounds]


@pytest.mark.parametrize("settings", [{}, {"preset": "paper"}, {"gate": "any_certain", "threshold": 0.4}], ids=str)
def test_actors_write_what_the_same_weights_write_here(engine, here, settings):
    wanted = here.generate_batch(PROMPTS, max_tokens=16, **settings)
    got = engine.generate_batch(PROMPTS, max_tokens=16, **settings)
    assert [c.text for c in got] == [c.text for c in wanted]
    assert list(map(told, got)) == list(map(told, wanted))
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.usage.completion_tokens == theirs.usage.completion_tokens
        for a, b in zip(mine.usage.members, theirs.usage.members, strict=True):
            assert (a.forward_passes, a.branches_skipped) == (b.forward_passes, b.branches_skipped)


def test_local_members_and_actors_mix(actors, here):
    with Engine(members=[tiny.member("llama"), actors[1]]) as mixed:
        assert mixed.generate(PROMPTS[0], max_tokens=16).text == here.generate(PROMPTS[0], max_tokens=16).text


def test_a_killed_actor_comes_back_and_the_request_goes_on_unchanged(engine, here, actors):
    wanted = here.generate(PROMPTS[0], max_tokens=40)
    chunks = engine.stream(PROMPTS[0], max_tokens=40)
    begun = next(chunks).text
    kill(actors[0])
    assert begun + "".join(chunk.text for chunk in chunks) == wanted.text
    assert engine.generate(PROMPTS[1], max_tokens=16).text == here.generate(PROMPTS[1], max_tokens=16).text


def test_requests_leave_nothing_in_the_actors(engine, actors):
    stream = engine.stream(PROMPTS[0], max_tokens=64)
    next(stream)
    stream.close()
    deadline = time.monotonic() + 20
    while any(map(sessions, actors)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_errors_cross_the_border_as_they_are(engine):
    with pytest.raises(ContextWindowError, match=r"'llama0'|'gemma0'") as caught:
        engine.generate("word " * 5000)
    assert caught.value.context_window > 0


def test_an_actor_that_does_not_answer_is_an_error_within_the_timeout(folders, cluster, monkeypatch):
    config = MemberConfig(model=folders[0], name="slow", placement="ray", num_cpus=0)
    [member] = load_members(EngineConfig(members=(config,), progress=False, prepare_grammars=False))
    with Engine(members=[member, tiny.member("gemma")]) as engine:
        _, pid = ray.get(member.actor.facts.remote())
        monkeypatch.setattr(member, "_timeout", 1.0)
        os.kill(pid, signal.SIGSTOP)
        try:
            begun = time.monotonic()
            with pytest.raises(UnavailableError, match=r"'slow' is unavailable.*within 1 s"):
                engine.generate(PROMPTS[0], max_tokens=8)
            assert time.monotonic() - begun < 30
            going_on = engine.generate(PROMPTS[0], max_tokens=8, on_member_failure="continue")
            assert [f.member for f in going_on.trace.failures] == ["slow"]
        finally:
            os.kill(pid, signal.SIGCONT)
            member.close()


def test_an_actor_that_is_gone_for_good_is_an_error(folders, cluster):
    config = MemberConfig(model=folders[0], name="gone", placement="ray", num_cpus=0)
    [member] = load_members(EngineConfig(members=(config,), progress=False, prepare_grammars=False))
    with Engine(members=[member]) as engine:
        ray.kill(member.actor)
        with pytest.raises(UnavailableError, match="its actor died"):
            engine.generate(PROMPTS[0], max_tokens=8)


def test_weights_that_cannot_be_loaded_are_told_from_the_actor(cluster, tmp_path, folders, monkeypatch):
    config = MemberConfig(model=folders[0], placement="ray", num_cpus=0, device="cuda:7")
    with pytest.raises(LoadError, match="its actor could not load it"):
        load_members(EngineConfig(members=(config,), progress=False))


def test_without_ray_the_extra_is_named(monkeypatch, folders):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ImportError, match=r"adafuse-integrations\[ray\]"):
        ray_members.load_ray(MemberConfig(model=folders[0], placement="ray"), EngineConfig(members=("x",)))
