"""Tied weights whose originals are on other stages, while a stage is initialized."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from torch import nn

from meshtrain.compat.nn import parameter_table
from meshtrain.parallel.cut.stubs import LacksParameters, PartStub


@contextmanager
def originals_in_place(model: nn.Module, copies: Mapping[str, str]) -> Iterator[None]:
    """Put copies of tied weights where the stock model has the originals, while the block runs.

    The rule of any module may fill an original: that of its owner, or of a module around it. So the
    rules must find it there. The other parameters of its module stay on the meta device.

    Args:
        model: of a stage.
        copies: FQN of an original on another stage -> name of a copy on this stage.
    """
    with ExitStack() as undone:
        # The names are read first, because a stub that is replaced has other parameters.
        parameters = {source: model.get_parameter(name) for source, name in copies.items()}
        for source, parameter in parameters.items():
            undone.enter_context(_stock_part_in_place(model, source))
            owner, _, kind = source.rpartition(".")
            undone.enter_context(_parameter_in_place(model.get_submodule(owner), kind, parameter))
        yield


@contextmanager
def _stock_part_in_place(model: nn.Module, source: str) -> Iterator[None]:
    """Replace the stub around a parameter, if any, by the part on the meta device."""
    words = source.split(".")
    names = (".".join(words[:end]) for end in range(1, len(words)))
    found = next(((name, stub) for name in names if isinstance(stub := model.get_submodule(name), PartStub)), None)
    if found is None:
        yield
        return
    name, stub = found
    model.set_submodule(name, stub.part)
    try:
        yield
    finally:
        model.set_submodule(name, stub)


@contextmanager
def _parameter_in_place(owner: nn.Module, kind: str, parameter: nn.Parameter) -> Iterator[None]:
    table, before = parameter_table(owner), parameter_table(owner).get(kind)
    # A parameter that was left out reads as zeros as long as it counts as lacking.
    lacking = owner.lacking if isinstance(owner, LacksParameters) else {}
    left_out = lacking.pop(kind, None)
    table[kind] = parameter
    try:
        yield
    finally:
        if left_out is None:
            table[kind] = before
        else:
            del table[kind]
            lacking[kind] = left_out
