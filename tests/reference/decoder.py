"""The method, written as plainly as it can be: the oracle that the engine must equal in float32.

Every distribution is computed from a member's whole text (and remembered by it, to keep the tests short): no KV,
no batching, no tree, no bounds. It shares with the engine only what has tests of its own: where words end, the
bytes of tokens, and the draws of the sampling strategies. Everything else is written again here.
"""

import math
from dataclasses import dataclass, field
from random import Random

import torch

from adafuse_engine.confidence import Distribution
from adafuse_engine.scaling import SAMPLED_FROM, first_tokens
from adafuse_engine.words import ends_by_itself, first_word_end, incomplete_suffix


@dataclass
class Reference:
    """One member: its model, its vocabulary, the ids of its text so far, and what it spelled this round."""

    model: object
    vocabulary: object
    ids: list[int]
    weight: float = 1.0
    own: dict = field(default_factory=dict)
    known: dict = field(default_factory=dict)

    def logprobs(self, extra):
        """Log-probabilities of every token after the text and ``extra``. The only place a model runs."""
        text = (*self.ids, *extra)
        if text not in self.known:
            with torch.no_grad():
                out = self.model(input_ids=torch.tensor([text]), use_cache=False, logits_to_keep=1)
            row = out.logits[0, -1].double()
            row[list(self.vocabulary.banned)] = -math.inf
            self.known[text] = torch.log_softmax(row, 0)
        return self.known[text]


def confidence(row, kind):
    p = row.exp()
    if kind != "entropy":
        best, second = p.topk(2).values.tolist()
        return best - second if kind == "margin" else best
    size = int(torch.isfinite(row).sum())
    return 1 + float((p * row.nan_to_num(neginf=0)).sum()) / math.log(size)


def finish_word(m, before, token, s):
    """Greedily from ``token`` to the end of its word: its bytes, its ids, and whether it really ended."""
    ids, data = [], b""
    while True:
        ids.append(token)
        data += m.vocabulary.bytes_of(token)
        token = int(m.logprobs([*before, *ids]).argmax())
        inside = incomplete_suffix(data) > 0
        end = first_word_end(data + m.vocabulary.bytes_of(token))
        if token in m.vocabulary.ends or (end is not None and end <= len(data) and not inside):
            return data, ids, True
        if len(ids) >= s.max_word_tokens + (3 if inside else 0):
            return data, ids, False


def certain_words(m, s):
    words, closed, ids = (), (), []
    while len(words) < s.max_words:
        row = m.logprobs(ids)
        if confidence(row, s.confidence) < s.threshold:
            break
        if int(row.argmax()) in m.vocabulary.ends:
            return words, closed, ids, True
        data, more, done = finish_word(m, ids, int(row.argmax()), s)
        words, closed, ids = (*words, data), (*closed, done), ids + more
        m.own.setdefault(words, ids)
    return words, closed, ids, False


def propose(m, s, random):
    words, closed, ids, ended = certain_words(m, s)
    if ended or len(words) == s.max_words:
        return [(words, closed, ended)]
    row = m.logprobs(ids)
    top = row.topk(min(SAMPLED_FROM, len(row)))
    ends = sorted(m.vocabulary.ends)
    end = float(row[ends].logsumexp(0)) if ends else -math.inf
    seen = Distribution(tuple(top.indices.tolist()), tuple(top.values.tolist()), end, 0.0, 0.0, len(row))
    found = []
    for token in first_tokens(seen, m.vocabulary.ends, s, random):
        if token in m.vocabulary.ends:
            found.append((words, closed, True))
            continue
        data, more, done = finish_word(m, ids, token, s)
        m.own.setdefault((*words, data), ids + more)
        found.append(((*words, data), (*closed, done), False))
    return found


def spelling(m, words):
    """This member's ids for the words: as it wrote them itself, as far as it did; else encoded word by word."""
    ids = []
    for n in range(1, len(words) + 1):
        ids = m.own.get(words[:n]) or ids + m.vocabulary.encode(words[n - 1])
    return ids


def score(m, candidate, s):
    """Per depth the log-probability of the words up to there, word end included; the total; the length."""
    words, closed, ended = candidate
    depths, ids, total = [], [], 0.0
    for n in range(1, len(words) + 1):
        ids = spelling(m, words[:n])
        total = sum(float(m.logprobs(ids[:i])[ids[i]]) for i in range(len(ids)))
        mass = 0.0
        if s.word_end_mass and closed[n - 1] and not ends_by_itself(words[n - 1]):
            mass = float(m.logprobs(ids)[list(m.vocabulary.starters)].logsumexp(0))
        depths.append(total + mass)
    if ended:
        total += float(m.logprobs(ids)[sorted(m.vocabulary.ends)].logsumexp(0))
        depths.append(total)
    length = len(ids) if s.fusion == "mean_nll" else len(b"".join(words)) * math.log(2)
    return depths, total, length + ended * (1 if s.fusion == "mean_nll" else math.log(2))


def mix(values, weights, arithmetic):
    pairs = list(zip(weights, values, strict=True))
    return math.log(sum(w * math.exp(v) for w, v in pairs)) if arithmetic else sum(w * v for w, v in pairs)


def pick(values, s, random):
    top = max(values)
    if s.temperature == 0 or len(values) == 1:
        return values.index(top)
    return random.choices(range(len(values)), [math.exp((v - top) / s.temperature) for v in values])[0]


def fuse(members, candidates, s, random):
    """The winner's words and whether the text ends after them."""
    weights = [m.weight / sum(n.weight for n in members) for m in members]
    arithmetic = s.mix == "arithmetic" or (s.mix == "auto" and s.fusion == "vote")
    scores = [[score(m, c, s) for m in members] for c in candidates]
    if s.fusion == "word_posterior":
        steps = [[*words, *([None] if ended else [])] for words, _, ended in candidates]
        alive, depth = list(range(len(candidates))), 0
        while True:
            groups = {}
            for c in alive:
                if depth < len(steps[c]):
                    groups.setdefault(steps[c][depth], []).append(c)
            values = [mix([x[0][depth] for x in scores[g[0]]], weights, arithmetic) for g in groups.values()]
            if depth and max(values, default=-1) <= math.log(0.5):
                break
            best = values.index(max(values)) if depth else pick(values, s, random)
            alive, depth = list(groups.values())[best], depth + 1
        chosen = steps[alive[0]][:depth]
        return tuple(w for w in chosen if w is not None), None in chosen
    if s.fusion != "vote":
        values = [mix([total / length for _, total, length in row], weights, arithmetic) for row in scores]
    else:
        say = [w * confidence(m.logprobs([]), s.confidence) for w, m in zip(weights, members, strict=True)]
        norms = [math.log(sum(math.exp(row[k][1]) for row in scores)) for k in range(len(members))]
        values = [mix([x[1] - n for x, n in zip(row, norms, strict=True)], say, arithmetic) for row in scores]
    words, _, ended = candidates[pick(values, s, random)]
    return words, ended


def decode(members, s, seed=0):
    """The ledger after at most ``s.max_tokens`` tokens of the first member."""
    if s.temperature == 0 and all(m.model is members[0].model and m.ids == members[0].ids for m in members):
        s = s.model_copy(update={"branches": 1})
    ledger, tokens, leader, index = b"", 0, None, 0
    while True:
        for m in members:
            m.own = {}
        sure = [confidence(m.logprobs([]), s.confidence) for m in members]
        stays = s.catch_up == "lazy" and leader is not None and sure[leader] >= s.threshold
        if s.gate == "any_certain" and not stays:
            leader = sure.index(max(sure)) if max(sure) >= s.threshold else None
        if leader is not None:
            words, _, _, ended = certain_words(members[leader], s)
        else:
            proposals = [propose(m, s, Random(f"{seed}/{index}/{k}")) for k, m in enumerate(members)]
            union = {}
            for c in (c for p in proposals for c in p):
                union.setdefault((b"".join(c[0]), c[2]), c)
            candidates = list(union.values())
            if len(candidates) == 1:
                words, _, ended = candidates[0]
            else:
                words, ended = fuse(members, candidates, s, Random(f"{seed}/{index}/commit"))
        first = spelling(members[0], words)
        ledger += b"".join(map(members[0].vocabulary.bytes_of, first[: s.max_tokens - tokens]))
        tokens += len(first)
        if ended or tokens >= s.max_tokens:
            return ledger
        for m in members:
            m.ids = m.ids + spelling(m, words)
        index += 1
