"""User errors of some ranks are raised on all."""

import pytest
import torch.distributed as dist

from meshtrain.errors import ModelError
from meshtrain.runtime.agreement import gather_objects, is_first_rank, raise_together
from tests.ranks import run_on_ranks


def fail_on_some() -> tuple[list[int], bool, tuple[str, ...]]:
    rank = dist.get_rank()
    raise_together([], ModelError)
    try:
        raise_together([[], ["a", "b"], ["b", "c"]][rank], ModelError)
    except ModelError as error:
        return gather_objects(rank), is_first_rank(), error.lines
    return [], False, ()


def test_all_ranks_raise_each_problem_of_any_rank_once() -> None:
    problems = ("a", "b", "c")
    assert run_on_ranks(3, fail_on_some) == [([0, 1, 2], rank == 0, problems) for rank in range(3)]


def test_agreement_works_without_a_process_group() -> None:
    assert gather_objects("x") == ["x"]
    assert is_first_rank()
    with pytest.raises(ModelError, match="broken"):
        raise_together(["broken"], ModelError)
