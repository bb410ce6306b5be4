"""What may change between a stop and a resume."""

from meshtrain.training.directory import decisive


def test_keys_that_only_begin_like_a_free_key_decide() -> None:
    run = {
        "plan": {"mesh": {"tp": 2}},
        "steps": 5,
        "plan_search": 1,
        "data": {"cache_directory": "a", "form": "packed"},
    }
    assert decisive(run) == {"plan_search": 1, "data.form": "packed"}
