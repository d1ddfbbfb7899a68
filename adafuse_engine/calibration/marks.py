"""How right an answer is, from 0 to 1, given the answers that would have been right.

Exact match and F1 are those of SQuAD (Rajpurkar et al. 2016), the number is that of GSM8K (Cobbe et al. 2021).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

__all__ = ["MARKS", "contains", "exact_match", "f1", "normalised", "number_match"]

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def normalised(text: str) -> str:
    """Lower case, without punctuation, articles and spare white space."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(answer: str, gold: Sequence[str]) -> float:
    """1 if the answer is one of the right ones, normalised."""
    return float(any(normalised(answer) == normalised(one) for one in gold))


def contains(answer: str, gold: Sequence[str]) -> float:
    """1 if one of the right answers stands somewhere in this one, normalised."""
    return float(any(f" {normalised(one)} " in f" {normalised(answer)} " for one in gold))


def f1(answer: str, gold: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over words, against the right answer that it is nearest to."""
    return max(_f1(normalised(answer).split(), normalised(one).split()) for one in gold)


def _f1(said: list[str], wanted: list[str]) -> float:
    common = sum((Counter(said) & Counter(wanted)).values())
    if not said or not wanted:
        return float(said == wanted)
    return 2 * common / (len(said) + len(wanted))


def number_match(answer: str, gold: Sequence[str]) -> float:
    """1 if the last number of the answer is that of a right one."""
    said = _last_number(answer)
    return float(said is not None and any(said == _last_number(one) for one in gold))


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


MARKS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "exact_match": exact_match,
    "f1": f1,
    "contains": contains,
    "number": number_match,
}
"""The marks by name."""
