"""The loop of a request, on scripted members."""

import pytest

from adafuse_engine import ContextWindowError, DecodingConfig, Engine, MemberError, NonFiniteLogitsError
from adafuse_engine.testing import ScriptedMember

ODD = ' Said:  "it\'s"\n\n\tdef f(x):\n\t\treturn x  # 你好世界\r\n 🎉👩‍👩‍👧 -- 42 !\n'
LOW = DecodingConfig(threshold=0.7)


def engine(*members, **options):
    return Engine(members=members, decoding=DecodingConfig(**options))


def two(answer=ODD, other=None, sure=0.9, unsure=0.4, **options):
    return engine(
        ScriptedMember("a", answer, confidence=sure),
        ScriptedMember("b", answer if other is None else other, confidence=unsure),
        **options,
    )


@pytest.mark.parametrize("preset", ["default", "paper"])
@pytest.mark.parametrize("gate", ["never", "any_certain"])
@pytest.mark.parametrize("catch_up", ["eager", "lazy"])
@pytest.mark.parametrize("fusion", ["mean_nll", "bits_per_byte", "word_posterior", "vote"])
def test_text_of_every_kind_comes_out_byte_for_byte(preset, gate, catch_up, fusion):
    with two() as e:
        done = e.generate("x", preset=preset, gate=gate, catch_up=catch_up, fusion=fusion)
    assert done.text == ODD
    assert done.finish_reason == "stop"


def test_a_certain_member_writes_alone_up_to_max_words_and_the_others_only_follow():
    with two(" one two three four five", gate="any_certain", max_words=2) as e:
        rounds = e.generate("x").trace.rounds
    assert [r.text for r in rounds] == [" one two", " three four", " five"]
    assert all(r.leader == "a" and not r.fused for r in rounds)
    assert rounds[-1].end


def test_a_leader_never_commits_its_first_uncertain_word():
    with engine(ScriptedMember("a", " one two", confidence=0.5), gate="any_certain", threshold=0.7) as e:
        assert all(r.leader is None for r in e.generate("x").trace.rounds)


def test_an_uncertain_ensemble_fuses_under_the_gate_too():
    with two(sure=0.5, gate="any_certain") as e:
        done = e.generate("x")
    assert done.text == ODD
    assert all(r.leader is None for r in done.trace.rounds)
    assert done.trace.fused_rounds == len(done.trace.rounds)


def test_lazy_followers_compute_nothing_while_the_leader_is_certain():
    with two(gate="any_certain", catch_up="lazy") as e:
        usage = {m.name: m for m in e.generate("x").usage.members}
    assert usage["b"].forward_passes == 1
    assert usage["b"].tokens_processed == usage["b"].prompt_tokens
    assert usage["a"].forward_passes > 5


def test_members_propose_different_words_and_the_better_scored_wins():
    with two(" yes", " no", sure=0.6, unsure=0.2) as e:
        first = e.generate("x").trace.rounds[0]
    texts = [c.text for c in first.candidates]
    assert " yes" in texts
    assert " no" in texts
    assert first.fused
    assert first.candidates[first.winner].text == " yes"
    assert first.candidates[first.winner].proposers == ("a",)
    assert set(first.confidence) == {"a", "b"}
    assert all(c.scores.keys() == {"a", "b"} for c in first.candidates)


def test_weights_turn_the_decision():
    a, b = ScriptedMember("a", " yes", confidence=0.5), ScriptedMember("b", " no", confidence=0.5)
    with Engine(members=[a, b], weights=[0.9, 0.1]) as e:
        assert e.generate("x").text == " yes"
    with Engine(members=[a, b], weights=[0.1, 0.9]) as e:
        assert e.generate("x").text == " no"
    assert e.weights == pytest.approx((0.1, 0.9))


def test_candidates_that_agree_are_committed_unscored():
    with two(" one two", sure=0.95, unsure=0.95) as e:
        rounds = e.generate("x").trace.rounds
    assert not any(r.fused for r in rounds)
    assert rounds[0].candidates[0].proposers == ("a", "b")
    assert rounds[0].candidates[0].score is None


def test_a_single_member_writes_greedily_whatever_the_preset():
    with engine(ScriptedMember("a", ODD, confidence=0.1)) as e:
        for preset in ("default", "paper"):
            done = e.generate("x", preset=preset)
            assert done.text == ODD
            assert all(len(r.candidates) == 1 for r in done.trace.rounds)


def test_the_same_member_twice_is_that_member_once():
    member = ScriptedMember("a", ODD, confidence=0.1)

    class Again(ScriptedMember):
        """Opens sessions of the first member under a name of its own."""

        async def open(self, prompt, settings):
            return await member.open(prompt, settings)

    with engine(member, Again("b")) as e:
        done = e.generate("x")
    assert done.text == ODD
    assert all(len(r.candidates) == 1 for r in done.trace.rounds)


# ---- how texts end


@pytest.mark.parametrize("stop", ["two", "wo th", [" two"], ["zzz", "o"], "e t"])
@pytest.mark.parametrize("preset", ["default", "paper"])
def test_a_stop_string_ends_the_text_and_is_absent_from_it(stop, preset):
    text = " one two three"
    stops = [stop] if isinstance(stop, str) else stop
    expected = text[: min(i for s in stops if (i := text.find(s)) >= 0)]
    with two(text) as e:
        done = e.generate("x", stop=stop, preset=preset)
        assert (done.text, done.finish_reason) == (expected, "stop")
        assert "".join(c.text for c in e.stream("x", stop=stop, preset=preset)) == expected


def test_text_that_may_become_a_stop_string_is_held_back_and_then_given():
    with two(" one STO ne STOP x", max_words=1) as e:
        pieces = [c.text for c in e.stream("x", stop="STOP", max_words=1)]
    assert "".join(pieces) == " one STO ne "
    assert pieces[1] == " "


def test_text_held_back_at_the_end_is_not_lost():
    with two(" one STO") as e:
        assert e.generate("x", stop="STOP").text == " one STO"


def test_max_tokens_counts_the_first_members_tokens_exactly():
    with two(" abcdefgh ijklmnop qrst") as e:
        for n in range(1, 6):
            done = e.generate("x", max_tokens=n)
            assert done.usage.completion_tokens == n
            assert done.finish_reason == ("stop" if n > 5 else "length")
        assert e.generate("x", max_tokens=1).text == " abcd"
        assert e.generate("x", max_tokens=99).finish_reason == "stop"


def test_a_character_cut_by_max_tokens_is_left_out():
    cut = ScriptedMember("a", " ab")
    cut.encode = lambda data: list(data)
    cut._answer = " 好"
    with engine(cut) as e:
        assert [e.generate("x", max_tokens=n).text for n in (1, 2, 3, 4)] == [" ", " ", " ", " 好"]


def test_a_text_that_fills_the_context_window_ends_by_length():
    a = ScriptedMember("a", " word" * 100, context_window=20)
    with engine(a, ScriptedMember("b", " word" * 100)) as e:
        done = e.generate("x")
    assert done.finish_reason == "length"
    assert " word" * 8 in done.text
    assert done.usage.prompt_tokens + done.usage.completion_tokens <= 20


def test_a_long_word_is_split_and_nothing_is_lost():
    with two(" " + "x" * 100, max_word_tokens=3) as e:
        done = e.generate("x")
    assert done.text == " " + "x" * 100
    assert max(len(r.text) for r in done.trace.rounds) < 100


# ---- draws


def test_a_seed_repeats_an_answer_and_another_may_change_it():
    with two(" yes it is", " no it was", sure=0.2, unsure=0.2) as e:
        texts = {e.generate("x", temperature=3.0, seed=s).text for s in range(12)}
        assert len(texts) > 1
        assert len({e.generate("x", temperature=3.0, seed=4).text for _ in range(3)}) == 1


def test_without_a_seed_the_one_drawn_stands_in_the_trace():
    with two(sure=0.2) as e:
        first = e.generate("x", temperature=2.0)
        assert e.generate("x", temperature=2.0, seed=first.trace.seed).text == first.text


# ---- members that fail


def test_a_member_whose_scores_are_nan_abstains_and_the_trace_says_so():
    a = ScriptedMember("a", " one two three", confidence=0.3)
    b = ScriptedMember("b", " one two three", confidence=0.3)

    # From its second forward on: its proposals are made by then, and only its scores are NaN.
    class Nan(ScriptedMember):
        async def open(self, prompt, settings):
            session = await super().open(prompt, settings)
            score = session.score

            async def wrong(candidates, settings):
                from dataclasses import replace

                made = await score(candidates, settings)
                return [replace(s, logprobs=tuple(float("nan") for _ in s.logprobs)) for s in made]

            session.score = wrong
            return session

    with engine(a, b, Nan("c", " one two three", confidence=0.3)) as e:
        done = e.generate("x")
    assert done.text == " one two three"
    assert done.trace.rounds[0].abstained == ("c",)
    assert done.trace.rounds[0].candidates[0].scores["c"] is None


def test_nan_logits_are_an_error_that_names_the_member_and_what_to_do():
    with (
        engine(ScriptedMember("a", " one two"), ScriptedMember("b", " one two", nan_from=2)) as e,
        pytest.raises(NonFiniteLogitsError, match=r"'b'.*dtype="),
    ):
        e.generate("x")


def test_an_exception_in_a_member_reaches_the_caller_as_itself_and_frees_the_others():
    def broken(number):
        if number == 3:
            raise MemberError("member 'b' failed: on purpose")

    a, b = ScriptedMember("a", ODD), ScriptedMember("b", ODD, on_forward=broken)
    with engine(a, b) as e:
        with pytest.raises(MemberError, match="on purpose"):
            e.generate("x")
        assert (a.open_sessions, b.open_sessions) == (0, 0)
        assert e.generate("x").text == ODD


def test_a_prompt_over_a_context_window_gives_the_numbers():
    with (
        engine(ScriptedMember("a", "x"), ScriptedMember("b", "x", context_window=8)) as e,
        pytest.raises(ContextWindowError, match=r"31 tokens for member 'b'.*8"),
    ):
        e.generate("word " * 30)


def test_the_trace_is_plain_json():
    import json

    with two() as e:
        done = e.generate("x", seed=1)
    assert json.loads(json.dumps(done.to_dict())) == done.to_dict()
