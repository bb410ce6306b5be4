"""A copied module shares nothing with the original but what the memo says."""

import copy
from typing import Any

import torch
from torch import nn

from meshtrain.models.copying import copy_module


class Owner(nn.Module):
    """Has each kind of attribute that is copied in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.register_buffer("counts", torch.ones(3), persistent=False)
        self.settings, self.alias = {"sizes": [1, 2]}, self.first
        self.first.register_forward_hook(count)


class Own(nn.Linear):
    """Says itself how it is copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Own":
        return self


def count(module: nn.Module, args: Any, output: Any) -> None:
    """Do nothing."""


def test_copy_has_its_own_values_and_the_same_ties() -> None:
    owner = Owner()
    made = copy_module(owner, {})
    assert type(made) is Owner
    assert made.first is made.alias is not owner.first
    assert made.first.weight is made.second.weight is not owner.first.weight
    assert torch.equal(made.first.weight, owner.first.weight)
    assert made.counts is not owner.counts
    assert made._non_persistent_buffers_set == {"counts"}
    made.settings["sizes"].append(3)
    assert owner.settings == {"sizes": [1, 2]}
    assert [*made.first._forward_hooks.values()] == [count]
    assert made.first._forward_hooks is not owner.first._forward_hooks


def test_copy_is_that_of_deepcopy() -> None:
    owner = Owner()
    made, expected = copy_module(owner, {}), copy.deepcopy(owner)
    assert vars(made).keys() == vars(expected).keys()
    assert [*made.state_dict()] == [*expected.state_dict()]
    assert str(made) == str(expected)


def test_parts_of_the_memo_are_taken_as_they_are() -> None:
    owner = Owner()
    made = copy_module(owner, {id(owner.first): owner.first})
    assert made.first is made.alias is owner.first
    assert made.second is not owner.second


def test_class_that_says_how_it_is_copied_is_asked() -> None:
    owner = nn.Sequential(Own(2, 2))
    made = copy_module(owner, {})
    assert made is not owner
    assert made[0] is owner[0]
