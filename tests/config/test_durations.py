"""How long a run may take, as a person writes it."""

import pytest

from meshtrain.config.run import duration_seconds


@pytest.mark.parametrize(
    ("text", "seconds"), [("3h30m", 12_600), ("90m", 5_400), ("45s", 45), ("1h1m1s", 3_661), ("0s", 0)]
)
def test_durations(text: str, seconds: int) -> None:
    assert duration_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "3", "3.5h", "30m3h", "3 h", "h"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match=f'expected a duration such as "3h30m", "90m" or "45s", found \'{text}\''):
        duration_seconds(text)
