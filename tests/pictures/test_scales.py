"""Scales, ticks, units and texts that must fit."""

import pytest

from meshtrain.pictures.scales import BYTES, Scale, padded_range, round_step, shown_value, unit_for
from meshtrain.pictures.svg import label, legend, shortened, shown, text_width, wrapped


@pytest.mark.parametrize(
    ("value", "quantity", "text"),
    [
        (0, "bytes", "0 bytes"),
        (1023, "bytes", "1,023 bytes"),
        (1536, "bytes", "1.50 KiB"),
        (80 * 2**30, "bytes", "80 GiB"),
        (0.00123, "seconds", "1.23 ms"),
        (135.8, "seconds", "136 s"),
        (630, "seconds", "10.5 min"),
        (5400, "seconds", "1.50 h"),
        (12_345.6, "number", "12,346"),
        (3.14159, "number", "3.14"),
        (31.4159, "number", "31.4"),
        (3e-6, "number", "3e-6"),
        (float("nan"), "number", "not finite"),
        (-2.5, "number", "-2.50"),
        (69 * 2**30 + 1, "bytes", "69 GiB"),
        (2.97e-4, "number", "2.97e-4"),
    ],
)
def test_values_have_three_digits_and_a_unit(value, quantity, text):
    assert shown_value(value, quantity) == text


def test_ticks_are_round_and_inside():
    assert Scale(0.03, 0.98, 0, 100).ticks(5) == [(0.2, "0.2"), (0.4, "0.4"), (0.6, "0.6"), (0.8, "0.8")]
    assert [text for _, text in Scale(0, 4200, 0, 100).ticks(5)] == ["0", "1,000", "2,000", "3,000", "4,000"]
    assert [text for _, text in Scale(0, 3e-6, 0, 100).ticks(3)] == ["0", "1e-6", "2e-6", "3e-6"]
    gib = BYTES[3]
    assert Scale(0, 80 * 2**30, 0, 100).ticks(4, gib)[-1] == (80 * 2**30, "80")


def test_logarithmic_ticks_are_as_many_as_fit():
    assert [text for _, text in Scale(0.9, 110, 0, 100, is_log=True).ticks(5)] == ["1", "3", "10", "30", "100"]
    assert [text for _, text in Scale(2, 11, 0, 100, is_log=True).ticks(5)] == ["2", "5", "10"]
    assert [text for _, text in Scale(1e-6, 1e6, 0, 100, is_log=True).ticks(5)] == [
        "1e-6",
        "0.001",
        "1",
        "1,000",
        "1e6",
    ]
    assert [text for _, text in Scale(3.1, 3.2, 0, 100, is_log=True).ticks(5)] == [
        "3.10",
        "3.12",
        "3.14",
        "3.16",
        "3.18",
        "3.20",
    ]


def test_values_beyond_the_scale_are_drawn_at_its_ends():
    scale = Scale(0, 10, 100, 200)
    assert [scale.at(value) for value in (-5, 0, 5, 20)] == [100, 100, 150, 200]
    assert Scale(1, 100, 0, 10, is_log=True).at(10) == pytest.approx(5)


def test_steps_and_ranges():
    assert [round_step(least) for least in (0.7, 1, 1.1, 3, 6)] == [1, 1, 2, 5, 10]
    assert padded_range([2.0, 4.0], from_zero=True, is_log=False) == (0, 4.2)
    assert padded_range([2.0], from_zero=False, is_log=False) == (1.9, 2.1)
    assert padded_range([0.0], from_zero=False, is_log=False) == (-1, 1)
    assert padded_range([8.0], from_zero=False, is_log=True) == (4, 16)
    assert unit_for(0, "seconds").name == "µs"


def test_texts_fit():
    assert shortened("a long name", text_width("a long n")) == "a long…"
    assert shortened("name", 100) == "name"
    assert shortened("name", 3) == ""
    assert wrapped("one two three", text_width("one two")) == ["one two", "three"]
    assert shown(3.04) == "3"
    assert label(1, 2, "<&>") == '<text x="1" y="2">&lt;&amp;&gt;</text>'


def test_legend_breaks_into_rows():
    entries = [("blue", "parameters"), ("green", "optimizer"), ("pink", "loss")]
    assert legend(entries, 1000, 0)[1] == 18
    assert legend(entries, 120, 0)[1] == 54
    assert legend([], 120, 0) == ("", 0)
