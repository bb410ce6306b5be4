"""Phases become spans."""

from meshtrain.pictures.timeline import Span
from meshtrain.profiling.stopwatch import Phase, spans_of
from meshtrain.runtime.activity import Activity


def test_activity_tells_its_listener_about_each_phase_of_a_step() -> None:
    activity, seen = Activity(), []
    activity.begin_step(1)
    activity.listener = lambda it: seen.append((it.step, it.phase, it.stage, it.microbatch))
    activity.begin_step(2)
    activity.enter("forward", 1, 3)
    activity.end_step()
    activity.listener = None
    activity.begin_step(3)
    assert seen == [(2, "data", None, None), (2, "forward", 1, 3), (2, "between steps", None, None)]


def test_spans_follow_each_other_and_waits_are_joined() -> None:
    names: list[tuple[str, int | None, int | None]] = [
        ("data", None, None),
        ("before passes", None, None),
        ("forward", 1, 0),
        ("after forward", 1, 0),
        ("backward", 1, 0),
        ("after backward", 1, 0),
        ("backward", 0, 0),
        ("after backward", 0, 0),
        ("backward of weights", 1, 0),
        ("after backward of weights", 1, 0),
        ("reduction", 1, None),
        ("after reduction", 1, None),
        ("gradients", None, None),
        ("optimizer", None, None),
        ("metrics", None, None),
        ("hooks", None, None),
    ]
    spans = spans_of([Phase(*name, float(second)) for second, name in enumerate(names)])
    assert spans == [
        Span("other", 0.0, 1.0),
        Span("wait", 1.0, 2.0),
        Span("forward", 2.0, 3.0, 1, 0),
        Span("wait", 3.0, 4.0),
        Span("input gradient", 4.0, 5.0, 1, 0),
        Span("wait", 5.0, 6.0),
        Span("backward", 6.0, 7.0, 0, 0),
        Span("wait", 7.0, 8.0),
        Span("weight gradient", 8.0, 9.0, 1, 0),
        Span("wait", 9.0, 10.0),
        Span("gradients", 10.0, 11.0),
        Span("wait", 11.0, 12.0),
        Span("gradients", 12.0, 13.0),
        Span("optimizer", 13.0, 14.0),
        Span("other", 14.0, 15.0),
    ]
    waits = [
        Phase("after backward", 0, 0, 0.0),
        Phase("before passes", None, None, 1.0),
        Phase("hooks", None, None, 2.0),
    ]
    assert spans_of(waits) == [Span("wait", 0.0, 2.0)]
