"""Signatures agree as often as documents are similar, and bands are chosen for what they find."""

import numpy as np
import pytest

from meshtrain.config.corpus import DeduplicateConfig
from meshtrain.corpus.duplicates.minhash import Bands, MinHasher, choose_bands
from meshtrain.corpus.duplicates.shingles import Shingles


@pytest.mark.parametrize("similarity", [0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0])
def test_chosen_bands_find_98_percent_at_the_threshold_with_few_hashes(similarity: float) -> None:
    bands = choose_bands(DeduplicateConfig(similarity=similarity))
    assert bands.probability(similarity) >= 0.98
    assert bands.num_hashes <= 128
    steeper = Bands(bands.num_bands, bands.rows + 1)
    assert steeper.probability(similarity) < 0.98 or steeper.num_hashes > 128 or similarity == 1


def test_a_given_band_setting_is_used_and_the_other_is_derived() -> None:
    def chosen(num_buckets: int | None, hashes_per_bucket: int | None) -> Bands:
        return choose_bands(DeduplicateConfig(num_buckets=num_buckets, hashes_per_bucket=hashes_per_bucket))

    assert chosen(None, None) == Bands(22, 5)
    assert chosen(14, 8) == Bands(14, 8)
    assert chosen(None, 8) == Bands(66, 8)
    assert chosen(66, None) == Bands(66, 8)
    assert chosen(65, None) == Bands(65, 7)
    assert chosen(1, None) == Bands(1, 1)


def pairs_of(similarity: float, number: int, size: int) -> Shingles:
    """Return documents of which each two neighbors have a similarity: 2k and 2k + 1."""
    source = np.random.default_rng(0)
    num_common = round(size * 2 * similarity / (1 + similarity))
    sets = []
    for _ in range(number):
        values = source.integers(0, 2**64, 2 * size - num_common, dtype=np.uint64)
        sets += [np.sort(values[:size]), np.sort(values[size - num_common :])]
    return Shingles(np.concatenate(sets), np.arange(2 * number + 1) * size)


@pytest.mark.parametrize("similarity", [0.2, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("size", [10, 300])
def test_hashes_and_buckets_agree_with_the_expected_probability(similarity: float, size: int) -> None:
    number, bands = 1500, Bands(22, 5)
    shingles = pairs_of(similarity, number, size)
    exact = len(np.intersect1d(shingles.hashes[:size], shingles.hashes[size : 2 * size])) / len(
        np.union1d(shingles.hashes[:size], shingles.hashes[size : 2 * size])
    )
    hasher = MinHasher(bands)
    signatures = hasher.signatures(shingles)
    agreeing = np.count_nonzero(signatures[::2] == signatures[1::2], axis=1)
    deviation = np.sqrt(exact * (1 - exact) / bands.num_hashes)
    assert agreeing.mean() / bands.num_hashes == pytest.approx(exact, abs=5 * deviation / np.sqrt(number))
    # As far apart as independent hash functions would be.
    assert agreeing.std() / bands.num_hashes == pytest.approx(deviation, rel=0.1)
    keys = hasher.bucket_keys(signatures)
    share_bucket = (keys[::2] == keys[1::2]).any(axis=1).mean()
    expected = bands.probability(exact)
    assert share_bucket == pytest.approx(expected, abs=5 * np.sqrt(expected * (1 - expected) / number) + 0.001)
    assert np.count_nonzero(agreeing < bands.least_agreement(exact)) <= 0.005 * number


def test_documents_without_shingles_do_not_affect_others() -> None:
    shingles = pairs_of(0.5, 2, 20)
    with_empty = Shingles(shingles.hashes, np.array([0, 0, 20, 40, 40, 40, 60, 80, 80]))
    hasher = MinHasher(Bands(4, 3))
    signatures = hasher.signatures(with_empty)
    assert np.array_equal(signatures[[1, 2, 5, 6]], hasher.signatures(shingles))
    assert not signatures[[0, 3, 4, 7]].any()
    assert hasher.signatures(Shingles(shingles.hashes[:0], np.zeros(3, np.int64))).shape == (2, 12)
