"""The cache of operators on fake tensors returns what torch's own mode does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from meshtrain.compat import fake_operators
from meshtrain.compat.autograd import OperatorMode
from meshtrain.compat.fake import fake_tensors
from meshtrain.compat.fake_operators import FakeOperators, device_asked
from meshtrain.compat.operators_seen import tensors_of

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "new": lambda x: x * 2.0,
    "bool and int": lambda x: (x * True, x * 1, x * 1.0),
    "cast": lambda x: x.to(torch.bfloat16),
    "view": lambda x: x.view(2, 12),
    "view of a view": lambda x: x[1:].t(),
    "one part": lambda x: x.split([4]),
    "parts": lambda x: x.split([1, 3]),
    "expanded": lambda x: x.sum(0, keepdim=True).expand(4, 6),
    "in place": lambda x: x.clone().add_(1.0),
    "list": lambda x: torch._foreach_norm([x, x[0]]),
    "pair": lambda x: x.max(dim=0),
    "none": lambda x: torch.ops.aten.native_layer_norm_backward(
        x, x, [6], x.mean(1, keepdim=True), x.mean(1, keepdim=True), None, None, [True, False, False]
    ),
    "strided": lambda x: torch.empty_like(x.t()),
}


class _Cached(OperatorMode):
    def __init__(self, run: FakeOperators) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, _ = self._run(func, args, kwargs or {})
        return result


def described(x: Tensor, result: Any) -> list[tuple[Any, ...]]:
    own = x.untyped_storage()._cdata
    values = result if isinstance(result, list | tuple) else [result]
    found: list[tuple[Any, ...]] = [(type(result), len(values))]
    for it in tensors_of(values):
        storage = it.untyped_storage()
        layout = it.shape, it.stride(), it.storage_offset(), it.dtype, it.device
        found.append((*layout, storage.nbytes(), storage._cdata == own))
    return found


@pytest.mark.parametrize("name", CALLS)
def test_second_result_is_that_of_torch(name: str) -> None:
    call, run = CALLS[name], FakeOperators()
    with fake_tensors():
        x = torch.ones(4, 6)
        expected = described(x, call(x))
        for _ in range(3):
            y = torch.ones(4, 6)
            with _Cached(run):
                found = call(y)
            assert described(y, found) == expected


def test_known_operators_are_forgotten_if_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_operators, "MOST_KNOWN", 2)
    monkeypatch.setattr(FakeOperators, "_known", {})
    with fake_tensors(), _Cached(FakeOperators()):
        for size in (3, 4, 5, 3, 4, 5):
            assert (torch.ones(size) * 2.0).shape == (size,)
            assert len(FakeOperators._known) <= 2


def test_device_is_known_without_an_operator() -> None:
    with fake_tensors():
        x = torch.ones(2)
        assert device_asked(torch.ops.prim.device.default, (x,)) == torch.device("cpu")
