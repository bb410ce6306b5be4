"""float64 all the way: models of transformers cast to float32 inside norms, routers and softmax."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class KeepFloat64(TorchFunctionMode):
    """A block in which casting a float64 tensor to float32 does nothing.

    With the casts, a sum over processes behind one differs from a sum inside of one process by 1e-7, and a proof at
    1e-12 would rest on equal rounding.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not args or not isinstance(args[0], Tensor) or args[0].dtype != torch.float64:
            return func(*args, **kwargs)
        if func is Tensor.float:
            return args[0]
        widened = tuple(torch.float64 if value is torch.float32 else value for value in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*widened, **kwargs)
