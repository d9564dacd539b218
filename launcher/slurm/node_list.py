"""SLURM's compressed lists, read without ``scontrol``: ``gpu[01-03,7]-ib,login`` and ``4(x2),3``."""

from __future__ import annotations

import re

_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_MOST_HOSTS = 1_000_000


def expand_hosts(text: str) -> list[str]:
    """``a[1-2],b`` -> ``[a1, a2, b]``, in SLURM's order; leading zeros stay (``n[08-10]``).

    Raises:
        ValueError: what cannot be read.
    """
    return [host for part in _split(text) for host in _expand(part)]


def expand_counts(text: str) -> list[int]:
    """``4(x2),3`` -> ``[4, 4, 3]``: one number for each node.

    Raises:
        ValueError: what cannot be read.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"'{part}' in '{text}' is no count like 4 or 4(x2)")
        counts.extend([int(match[1])] * int(match[2] or 1))
    return counts


def _split(text: str) -> list[str]:
    """At commas outside brackets."""
    parts, depth, start = [], 0, 0
    for position, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise ValueError(f"brackets in the node list '{text}' do not match")
        if letter == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    if depth:
        raise ValueError(f"brackets in the node list '{text}' do not match")
    parts.append(text[start:])
    if not all(part.strip() for part in parts):
        raise ValueError(f"the node list '{text}' has an empty part")
    return [part.strip() for part in parts]


def _expand(part: str) -> list[str]:
    """One host pattern; each pair of brackets multiplies, the last one runs fastest."""
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, after = rest.partition("]")
    tails = _expand(after) if after else [""]
    hosts = [f"{before}{number}{tail}" for number in _numbers(inside) for tail in tails]
    if len(hosts) > _MOST_HOSTS:
        raise ValueError(f"'{part}' names more than {_MOST_HOSTS:,} hosts")
    return hosts


def _numbers(inside: str) -> list[str]:
    numbers: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"'{part}' is no number and no range in '[{inside}]'")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or int(last) - int(first) > _MOST_HOSTS:
            raise ValueError(f"the range '{part}' in '[{inside}]' cannot be counted up")
        numbers.extend(str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return numbers
