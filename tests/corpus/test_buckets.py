"""Shared buckets hold the documents with equal keys, and connect them to components."""

from collections import defaultdict
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from meshtrain.corpus.duplicates.buckets import (
    BUCKET_ENTRY,
    BucketEntries,
    Components,
    find_shared_buckets,
    write_parts,
)
from meshtrain.corpus.duplicates.minhash import Bands, MinHasher
from meshtrain.corpus.duplicates.shingles import shingles_of
from meshtrain.corpus.duplicates.sketches import SKETCHES, Sketches, SketchWriter
from tests.corpus.near_duplicates import similar_documents

BANDS = Bands(6, 2)


@pytest.fixture
def sketched(tmp_path: Path) -> tuple[Sketches, np.ndarray]:
    """Return the sketches of three shards, one of them empty, and the keys of all documents."""
    documents = similar_documents(300, seed=0)
    for number, (begin, end) in enumerate([(0, 100), (100, 100), (100, 300)]):
        writer = SketchWriter(tmp_path / SKETCHES / f"{number}", BANDS)
        with writer.open():
            own = documents[begin:end]
            writer.add([str(document["id"]) for document in own], shingles_of([str(one["text"]) for one in own], 5))
    hasher = MinHasher(BANDS)
    shingles = shingles_of([str(document["text"]) for document in documents], 5)
    return Sketches(tmp_path, ["0", "1", "2"]), hasher.bucket_keys(hasher.signatures(shingles))


def by_bucket(entries: BucketEntries) -> list[list[int]]:
    buckets = defaultdict(list)
    for bucket, document in entries.tolist():
        buckets[bucket].append(document)
    assert list(buckets) == list(range(len(buckets)))
    return list(buckets.values())


@pytest.mark.parametrize("keys_at_once", [10, 100, 1 << 20])
def test_documents_share_a_bucket_exactly_when_their_keys_are_equal(
    sketched: tuple[Sketches, np.ndarray], keys_at_once: int
) -> None:
    sketches, keys = sketched
    for band in range(BANDS.num_bands):
        expected = defaultdict(list)
        for document, key in enumerate(keys[:, band].tolist()):
            expected[key].append(document)
        found = by_bucket(np.concatenate(list(find_shared_buckets(sketches, band, keys_at_once))))
        assert found == [documents for _, documents in sorted(expected.items()) if len(documents) > 1]


def test_sketches_find_a_document_by_its_number(sketched: tuple[Sketches, np.ndarray]) -> None:
    sketches, _ = sketched
    documents = similar_documents(300, seed=0)
    assert sketches.num_documents == 300
    assert [sketches.identifier(number) for number in (0, 99, 100, 299)] == ["0", "99", "100", "299"]
    every = np.arange(0, 300, 7)
    assert sketches.num_shingles(every).tolist() == [len(sketches.shingles(number)) for number in every]
    assert np.array_equal(sketches.shingles(150), shingles_of([str(documents[150]["text"])], 5).hashes)
    signature = MinHasher(BANDS).signatures(shingles_of([str(documents[150]["text"])], 5))
    assert np.array_equal(sketches.agreement(np.array([3, 150]))[1], signature[0].astype(np.uint8))


def connected(groups: list[list[int]], number: int) -> list[int]:
    """Return the first document of each document's component, computed slowly."""
    component = list(range(number))
    for one, other in (pair for group in groups for pair in combinations(group, 2)):
        low, high = sorted((component[one], component[other]))
        component = [low if name == high else name for name in component]
    return component


def test_shared_buckets_connect_components_and_each_component_is_in_one_part(tmp_path: Path) -> None:
    source = np.random.default_rng(0)
    bands = [[sorted(source.choice(300, 3, replace=False).tolist()) for _ in range(25)] for _ in range(4)]
    entries = [
        np.array([(number, document) for number, group in enumerate(band) for document in group], BUCKET_ENTRY)
        for band in bands
    ]
    components = Components(300)
    for band in entries:
        components.unite(band)
    expected = connected([group for band in bands for group in band], 300)
    assert components.of(np.arange(300)).tolist() == expected
    assert 3 < len(set(expected)) < 290
    write_parts(entries, components, tmp_path, 5)
    parts = [np.fromfile(path, BUCKET_ENTRY) for path in sorted(tmp_path.iterdir())]
    found = [{expected[document] for document in part["document"]} for part in parts]
    assert sum(map(len, found)) == len(set.union(*found))
    buckets = sorted((bucket, document) for part in parts for bucket, document in part.tolist())
    numbered = enumerate(group for band in bands for group in band)
    assert buckets == [(number, document) for number, group in numbered for document in group]
