"""SLURM's compressed lists of nodes and of tasks for each node."""

from __future__ import annotations

import pytest

from launcher.slurm.node_list import expand_counts, expand_hosts

HOSTS = {
    "node1": ["node1"],
    "node1,node2": ["node1", "node2"],
    "node[1-3]": ["node1", "node2", "node3"],
    "gpu[08-10]": ["gpu08", "gpu09", "gpu10"],
    "gpu[1,3-4,007]": ["gpu1", "gpu3", "gpu4", "gpu007"],
    "a[1-2]-b[1-2]": ["a1-b1", "a1-b2", "a2-b1", "a2-b2"],
    "n[1-2].site,login,x[9]": ["n1.site", "n2.site", "login", "x9"],
    "127.0.1.[1-2]": ["127.0.1.1", "127.0.1.2"],
}


@pytest.mark.parametrize(("text", "hosts"), HOSTS.items(), ids=list(HOSTS))
def test_hosts(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "a,,b", "a[1-2", "a1-2]", "a[]", "a[x]", "a[3-1]", "a[[1]]", "a[1-99999999]"])
def test_what_is_no_list_of_hosts(text: str) -> None:
    with pytest.raises(ValueError, match="node list|range|number"):
        expand_hosts(text)


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("4(x2)", [4, 4]), ("4(x2),3", [4, 4, 3]), ("1,2(x1)", [1, 2])]
)
def test_counts(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x", "4(2)", "4x2", "-1"])
def test_what_is_no_list_of_counts(text: str) -> None:
    with pytest.raises(ValueError, match="no count"):
        expand_counts(text)
