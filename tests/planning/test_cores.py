"""Values are computed on all cores, in order, until the time is over."""

import time

from meshtrain.planning.cores import on_all_cores, owners_of


def waited(value: int) -> int:
    time.sleep(0.1)
    return value * value


def test_results_are_in_the_order_of_the_values() -> None:
    assert on_all_cores(waited, [3, 1, 2, 5, 4]) == [9, 1, 4, 25, 16]
    assert on_all_cores(waited, []) == []


def test_what_would_take_too_long_is_left_out_and_what_is_short_is_not() -> None:
    # One that costs 10,000 times as much as the others would take a quarter of an hour.
    values = list(range(12))
    costs = [1.0, 1.0, 1.0, 1.0, *[1e4] * 4, 1.0, 1.0, 1.0, 1.0]
    found = on_all_cores(waited, values, deadline=time.monotonic() + 120, costs=costs)
    assert found == [value * value for value in (0, 1, 2, 3, 8, 9, 10, 11)]


def test_values_of_a_kind_are_computed_by_one_process_unless_it_has_too_much_to_do() -> None:
    assert owners_of(2, [1.0] * 4, "abcd") == [0, 1, 0, 1]
    assert owners_of(2, [1.0] * 6, "aabbab") == [0, 1, 0, 0, 1, 0]
    assert owners_of(2, [1.0] * 6, "abbbbb") == [0, 1, 1, 1, 1, 0]
