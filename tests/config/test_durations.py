"""Durations in run files."""

import pytest

from meshtrain.config.run import duration_seconds


@pytest.mark.parametrize(
    ("text", "seconds"), [("3h30m", 12_600), ("90m", 5_400), ("45s", 45), ("1h1m1s", 3_661), ("0s", 0)]
)
def test_duration_is_parsed(text: str, seconds: int) -> None:
    assert duration_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "3", "3.5h", "30m3h", "3 h", "h"])
def test_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f'expected a duration such as "3h30m", "90m" or "45s", found \'{text}\''):
        duration_seconds(text)
