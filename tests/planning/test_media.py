"""Media of the heaviest micro-batch, as a bound of all that a run may have."""

import dataclasses

import pytest

from ftkit.data.records.media import Medium
from ftkit.data.rendering import Rendered
from ftkit.data.samples.sample_set import JoinedSamples, SampleSet
from ftkit.planning.media import heaviest_media, heaviest_of, size_of, with_media
from ftkit.planning.sequence_length import SequenceLength
from ftkit.planning.simulate import largest_micro_batch
from ftkit.strategies.step_memory import MediaSize, MicroBatchSize


def media(*sizes: int, length: int = 9) -> MediaSize:
    return MediaSize(kind="image", lengths=(length,), sizes=sizes)


def sample(*sizes: int, length: int = 9) -> Rendered:
    """Of `length` input tokens; each medium stands for one."""
    found = tuple(
        Medium("image", f"{size:064x}", f"{size}.png", place, place + 1, size)
        for place, size in enumerate(sizes)
    )
    return Rendered([0] * (length + 1), ((length, length + 1),), media=found)


FEW, MANY, LARGE = (3,), (2, 2, 2, 2), (5,)


def test_the_heaviest_are_most_in_all_and_one_is_as_large_as_any() -> None:
    found = heaviest_of([media(*FEW), None, media(*MANY, length=7), media(*LARGE)])
    assert found == media(5, 2, 2, 2, length=7)
    assert heaviest_of([None]) is None


def test_the_heaviest_are_found_among_samples_of_several_sources() -> None:
    one = SampleSet.of([sample(length=4), sample(*FEW), sample(*MANY, length=7)])
    other = SampleSet.of([sample(*LARGE), sample()])
    joined = JoinedSamples.one_after_another([one, other, SampleSet.of([sample()])])
    assert heaviest_media([joined]) == media(5, 2, 2, 2, length=7)
    assert joined.media_sizes is not None
    assert joined.media_sizes.tolist() == [0, 3, 8, 5, 0, 0]
    assert heaviest_media([SampleSet.of([sample()])]) is None


def test_sequences_without_media_have_no_length_among_them() -> None:
    sequences = [sample(*FEW), sample(length=4), sample(*MANY, length=7)]
    found = size_of([one.media for one in sequences], [len(one.ids) - 1 for one in sequences])
    assert found == MediaSize(kind="image", lengths=(9, 7), sizes=(*FEW, *MANY))
    assert size_of([()], [4]) is None


@pytest.mark.parametrize("is_row", [True, False])
def test_every_sequence_of_the_heaviest_micro_batch_has_the_heaviest(is_row: bool) -> None:
    batch = largest_micro_batch(3, 101, padding_free=is_row)
    assert with_media(batch, None, 3) == batch
    found = with_media(batch, media(1, 2, length=20), 3)
    expected = MediaSize(kind="image", lengths=(100,) * 3, sizes=(1, 2) * 3)
    assert found == dataclasses.replace(batch, media=expected)


def test_a_row_has_room_for_more_short_sequences_with_media_than_for_long_ones() -> None:
    batch = largest_micro_batch(50, 101, padding_free=True, most_tokens=250)
    found = with_media(batch, media(4, length=20), 50)
    assert found.media is not None and found.lengths == found.media.lengths
    assert (len(found.media.sizes), sum(found.lengths or ())) == (12, 250)
    few = with_media(batch, media(4, length=20), 5)
    assert few.media is not None and len(few.media.sizes) == 5


def test_lengths_of_sequences_with_media_are_their_own() -> None:
    own = MediaSize(kind="image", lengths=(30, 12), sizes=(4, 4))
    row = MicroBatchSize(sequences=5, positions=40, targets=9, tokens=103, media=own)
    assert row.lengths == (30, 12, 40, 11, 10)
    longest = dataclasses.replace(row, positions=30, sequences=3, tokens=50)
    assert longest.lengths == (30, 12, 8)


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("kind", "count", "words"),
    [
        ("image", 1, "1 image"),
        ("image", 3, "3 images"),
        ("audio", 1, "1 piece of audio"),
        ("audio", 3, "3 pieces of audio"),
    ],
)
def test_media_of_the_longest_sample_are_counted(kind: str, count: int, words: str) -> None:
    known = MediaSize(kind=kind, lengths=(9,), sizes=(4,) * count)
    length = SequenceLength(tokens=300, source="data", media=known)
    assert length.words == f"300 tokens (and {words}): the longest sample"
