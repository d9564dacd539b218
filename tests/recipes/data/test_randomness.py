"""Counter-based random numbers and permutations: pure, the same everywhere."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from recipes.data.randomness import Permutation, as_uniform, key_of, random_bits, random_table


def test_bits_are_splitmix64() -> None:
    """The first numbers of the published generator from seed 0."""
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert random_bits(0, np.arange(3, dtype=np.uint64)).tolist() == expected


def test_keys_do_not_change() -> None:
    """Orders of running experiments hang on them."""
    assert key_of("order", 0, 0) == 16210311066531486343
    assert key_of("a", 1) != key_of("a1")


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    alone = random_table(7, np.array([5], dtype=np.uint64), 100)
    among = random_table(7, np.array([9, 5, 3], dtype=np.uint64), 100)
    assert (among[1] == alone[0]).all()
    assert (among[0] != among[1]).all()


def test_uniform_numbers_fill_the_interval() -> None:
    values = as_uniform(random_bits(1, np.arange(100_000, dtype=np.uint64)))
    assert values.min() >= 0 and values.max() < 1
    assert abs(values.mean() - 0.5) < 0.005
    assert np.histogram(values, bins=10, range=(0, 1))[0].min() > 9_500


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_every_permutation_is_one(size: int, key: int) -> None:
    permuted = Permutation(size, key)(np.arange(size))
    assert sorted(permuted.tolist()) == list(range(size))


@given(size=st.integers(1, 10**15), key=st.integers(0, 2**64 - 1), data=st.data())
def test_a_position_alone_goes_where_it_goes_among_others(size: int, key: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20))
    permutation = Permutation(size, key)
    together = permutation(np.array(positions))
    assert together.max() < size and together.min() >= 0
    assert [int(permutation(np.array([position]))[0]) for position in positions] == together.tolist()


def test_places_are_equally_likely() -> None:
    """Over many keys, each value comes to each place about equally often, also in small sets."""
    for size in (2, 3, 8, 21):
        counts = np.zeros((size, size))
        for key in range(300):
            counts[np.arange(size), Permutation(size, key)(np.arange(size))] += 1
        expected = 300 / size
        assert np.abs(counts - expected).max() < 6 * expected**0.5, size


def test_neighbours_are_torn_apart() -> None:
    permuted = Permutation(10_000, 3)(np.arange(10_000))
    assert np.mean(np.abs(np.diff(permuted)) < 100) < 0.04
    assert abs(np.corrcoef(np.arange(10_000), permuted)[0, 1]) < 0.05
