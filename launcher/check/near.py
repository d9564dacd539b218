"""Near matches: what somebody who typed this probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def near(word: str, candidates: Iterable[str], limit: int = 3) -> list[str]:
    """Candidates that look like ``word``, the likeliest first; case and ``-``/``_`` do not count."""
    known = list(candidates)
    plain: dict[str, str] = {}
    for candidate in known:
        plain.setdefault(_plain(candidate), candidate)
    wanted = _plain(word)
    found = [plain[match] for match in difflib.get_close_matches(wanted, plain, n=limit, cutoff=0.6)]
    beginnings = [candidate for text, candidate in plain.items() if len(wanted) > 2 and text.startswith(wanted)]
    return list(dict.fromkeys(found + beginnings))[:limit]


def near_keys(key: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """Near matches of a dotted key: misspelt where it is, the same last part elsewhere, or misspelt as a whole."""
    keys = list(known)
    group, _, last = key.rpartition(".")
    beside = {other.rpartition(".")[2]: other for other in keys if other.rpartition(".")[0] == group}
    misspelt = [beside[match] for match in near(last, beside, limit)]
    elsewhere = [other for other in keys if other.rpartition(".")[2] == last]
    plain = {_plain(other): other for other in keys}
    whole = [plain[match] for match in difflib.get_close_matches(_plain(key), plain, n=limit, cutoff=0.75)]
    return list(dict.fromkeys(misspelt + elsewhere + whole))[:limit]


def did_you_mean(matches: list[str]) -> str:
    """``did you mean A, B or C?``, or nothing."""
    if not matches:
        return ""
    if len(matches) == 1:
        return f"did you mean {matches[0]}?"
    return f"did you mean {', '.join(matches[:-1])} or {matches[-1]}?"


def _plain(word: str) -> str:
    return word.lower().replace("-", "_")
