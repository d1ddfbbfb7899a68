"""The slot cache and the tree forwards: logits as plain forwards give them, and no work done twice."""

import asyncio

import pytest
import torch

from adafuse_engine import Engine
from adafuse_engine.members.local.plain import PlainRunner, plain_logits
from adafuse_engine.members.local.runner import Feed, Tree, Want
from adafuse_engine.members.local.selfcheck import tree_attention_works
from tests.support import tiny

WANT = Want(3, True, True)


def worst(row, model, text):
    plain = plain_logits(model, text, row.logits.device)
    seen = torch.isfinite(row.logits)
    return (torch.log_softmax(row.logits[seen], 0) - torch.log_softmax(plain[seen], 0)).abs().max().item()


@pytest.mark.parametrize("kind", ["llama", "gemma", "mistral", "gpt2"])
def test_a_batch_of_trees_in_scattered_slots_equals_plain_forwards(kind):
    runner = tiny.local_model(kind).runner
    assert not isinstance(runner, PlainRunner)
    trees = [Tree(WANT) for _ in range(5)]
    for tree in trees:
        runner.open(tree, [5])
    runner.close(trees[1])
    runner.close(trees[3])
    live = [trees[4], trees[0], trees[2]]
    texts = [list(range(5, 60)), [7, 8], list(range(30, 50))]
    for tree, text in zip(live, texts, strict=True):
        runner.run([Feed(tree, (), text[:1], prefill=True)])
        runner.run([Feed(tree, (), text[1:], prefill=True)])
    runner.run([Feed(live[0], (0, 0, 2), (9, 10, 11)), Feed(live[1], (0,), (12,)), Feed(live[2], (0, 1), (13, 14))])
    runner.run([Feed(live[0], (3, 1), (15, 16)), Feed(live[2], (0,), (17,))])
    expected = {
        (0, 1): [9], (0, 2): [10], (0, 3): [10, 11], (0, 4): [10, 11, 15], (0, 5): [9, 16],
        (1, 1): [12], (2, 1): [13], (2, 2): [13, 14], (2, 3): [17],
    }  # fmt: skip
    for (i, node), path in expected.items():
        assert worst(live[i].rows[node], runner.model, texts[i] + path) < 1e-3


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_keeping_a_path_leaves_the_others_without_a_trace(kind):
    runner = tiny.local_model(kind).runner
    tree = Tree(WANT)
    runner.open(tree, [3])
    runner.run([Feed(tree, (), list(range(5, 25)), prefill=True)])
    runner.run([Feed(tree, (0, 0, 0, 2, 4), (40, 41, 42, 43, 44))])
    runner.keep(tree, [2, 4, 5])
    assert tree.prefix[-3:] == [41, 43, 44]
    runner.run([Feed(tree, (0, 0), (50, 51))])
    for node, token in ((1, 50), (2, 51)):
        assert worst(tree.rows[node], runner.model, [*range(5, 25), 41, 43, 44, token]) < 1e-3


def test_what_is_read_off_the_logits_is_right():
    model = tiny.local_model("llama")
    runner, vocabulary = model.runner, model.vocabulary
    tree = Tree(WANT)
    runner.open(tree, [3])
    [[root]] = runner.run([Feed(tree, (), [5, 6, 7], prefill=True)])
    [[child]] = runner.run([Feed(tree, (0,), (9,))])
    logits = plain_logits(runner.model, [5, 6, 7], runner.device).double()
    logits[list(vocabulary.banned)] = -torch.inf
    logs = torch.log_softmax(logits, 0)
    dist = root.distribution
    assert dist.top_ids == tuple(logs.topk(3).indices.tolist())
    assert dist.top_logprobs == pytest.approx(logs.topk(3).values.tolist(), abs=1e-4)
    assert dist.end_logprob == pytest.approx(logs[sorted(vocabulary.ends)].logsumexp(0).item(), abs=1e-4)
    assert dist.start_logmass == pytest.approx(logs[list(vocabulary.starters)].logsumexp(0).item(), abs=1e-4)
    assert dist.entropy == pytest.approx(-(logs.exp() * logs.nan_to_num(neginf=0)).sum().item(), abs=1e-3)
    assert child.logprob == pytest.approx(logs[9].item(), abs=1e-4)


def test_special_tokens_are_never_written_nor_given_mass():
    model = tiny.local_model("llama")
    pad = model.tokenizer.convert_tokens_to_ids("<|pad|>")
    assert pad in model.vocabulary.banned
    tree = Tree(WANT)
    model.runner.open(tree, [3])
    model.runner.run([Feed(tree, (), [5], prefill=True)])
    assert tree.rows[0].logits[pad] == -torch.inf


def test_a_model_that_cannot_attend_to_a_tree_takes_the_plain_road_and_says_so(caplog):
    with caplog.at_level("WARNING", logger="adafuse_engine"):
        model = tiny.local_model("mamba")
    assert isinstance(model.runner, PlainRunner)
    assert [r for r in caplog.records if "cannot attend to a tree" in r.message]


def test_the_self_check_notices_a_wrong_mask(monkeypatch):
    runner = tiny.local_model("gemma").runner
    assert tree_attention_works(runner)
    from adafuse_engine.members.local.attention import Masks

    build = Masks.build

    def all_seen(self, *args):
        masks = build(self, *args)
        return {kind: torch.zeros_like(mask) for kind, mask in masks.items()}

    monkeypatch.setattr(Masks, "build", all_seen)
    assert not tree_attention_works(runner)


def test_branches_do_not_copy_the_prefix():
    sizes = []
    for branches in (1, 30):
        runner = tiny.local_model("llama").runner
        tree = Tree(WANT)
        runner.open(tree, [5] * 600)
        runner.run([Feed(tree, (), [5] * 600, prefill=True)])
        runner.run([Feed(tree, [0] * branches, list(range(10, 10 + branches)))])
        sizes.append(runner.cache.bytes)
    assert sizes[0] == sizes[1] > 0


def test_the_prompt_is_fed_once_and_each_round_feeds_only_new_tokens():
    members = [tiny.member("llama", "a", 1), tiny.member("gemma", "b", 2)]
    fed = []
    for member in members:
        runner = member.model.runner
        run = runner.run
        runner.run = lambda feeds, run=run: fed.extend(len(f.tokens) for f in feeds) or run(feeds)
    with Engine(members=members) as engine:
        done = engine.generate("The ferry leaves the harbour. " * 40, max_tokens=30, threshold=0.4)
    prompts = [m.prompt_tokens for m in done.usage.members]
    assert min(prompts) > 200
    # Two prefills at most per chunk of 512, then only small trees.
    assert sorted(fed)[-1] <= 512
    assert sum(n for n in fed if n > 100) == sum(n for n in prompts)
    assert sum(fed) == sum(m.tokens_processed for m in done.usage.members)
    assert sum(fed) < sum(prompts) + 30 * 2 * 30


@pytest.mark.parametrize("options", [{"fusion": "vote", "mix": "auto"}, {"temperature": 1.0, "seed": 3}])
def test_where_no_bound_can_rule_anything_out_early_decisions_cost_no_forward(options):
    cost = []
    for early in (True, False):
        with Engine(members=[tiny.member("llama", "a", 1), tiny.member("gemma", "b", 2)]) as engine:
            done = engine.generate("The ferry", max_tokens=12, drafting=False, early_decisions=early, **options)
        cost.append([m.forward_passes for m in done.usage.members])
    assert cost[0] == cost[1]


async def test_concurrent_requests_are_batched_and_answer_as_they_do_alone():
    members = [tiny.member("llama", "a", 1), tiny.member("gemma", "b", 2)]
    prompts = [f"Line {i}: " + "the ferry " * i for i in range(8)]
    sizes = []
    runner = members[0].model.runner
    run = runner.run
    runner.run = lambda feeds: sizes.append(len(feeds)) or run(feeds)
    with Engine(members=members) as engine:
        alone = [engine.generate(p, max_tokens=16).text for p in prompts]
        assert max(sizes) == 1
        together = await asyncio.gather(*(engine.agenerate(p, max_tokens=16) for p in prompts))
    assert [c.text for c in together] == alone
    assert max(sizes) > 1


async def test_a_cancelled_request_frees_its_slot():
    member = tiny.member("llama", "a", 1)
    with Engine(members=[member]) as engine:
        task = asyncio.create_task(engine.agenerate("The ferry", max_tokens=1000))
        slots = member.model.runner.slots
        async with asyncio.timeout(10):
            while not slots.busy:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while slots.busy:
                await asyncio.sleep(0.001)
        assert engine.generate("The ferry", max_tokens=3).finish_reason in ("length", "stop")


def test_members_of_one_model_share_weights_slots_and_forwards():
    shared = tiny.local_model("llama", 3)
    views = [tiny.LocalMember(tiny.MemberConfig(model="m", name=n), shared, progress=False) for n in "ab"]
    sizes = []
    run = shared.runner.run
    shared.runner.run = lambda feeds: sizes.append(len(feeds)) or run(feeds)
    with Engine(members=views) as engine:
        done = engine.generate({"a": "One two three", "b": "The ferry leaves"}, max_tokens=10, seed=1)
    assert max(sizes) == 2
    assert [m.prompt_tokens for m in done.usage.members] != [0, 0]
    assert any(r.fused for r in done.trace.rounds)


def test_a_long_prompt_is_read_in_chunks():
    member = tiny.member("llama", "a", 1)
    lengths = []
    run = member.model.runner.run
    member.model.runner.run = lambda feeds: lengths.extend(len(f.tokens) for f in feeds) or run(feeds)
    with Engine(members=[member]) as engine:
        engine.generate("word " * 500, max_tokens=1)
    assert max(lengths) == member.model.runner.chunk


def test_nan_weights_are_an_error_that_names_the_member():
    from adafuse_engine import NonFiniteLogitsError

    member = tiny.member("llama", "broken", 1)
    member.model.runner.model.lm_head.weight.data[3] = float("nan")
    good = tiny.member("llama", "good", 1)
    with Engine(members=[good, member]) as engine, pytest.raises(NonFiniteLogitsError, match="'broken'"):
        engine.generate("The ferry")
