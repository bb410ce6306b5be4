"""torch.nn: the tables of a module, and changes to a single module without its class."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from torch import Tensor, nn

_HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_FORWARD = "forward"
_MIXIN = "_mixed_in"
# What a class may have and still be shared. Other values can hold the module, which the table would
# keep alive.
_SHARED: set[type] = {str, int, tuple, staticmethod}
_MIXED: WeakValueDictionary[Any, type] = WeakValueDictionary()
T = TypeVar("T", bound=nn.Module)


def shallow_copy_with(module: nn.Module, parameters: Mapping[str, nn.Parameter | None]) -> nn.Module:
    """Return a shallow copy of a module that has other parameters of its own.

    Why: a shallow copy shares the table of parameters, and a deep one would copy their values.
    Holds: torch 2.11 to 2.13.
    """
    copied = copy.copy(module)
    copied._parameters = dict(parameters)
    return copied


def parameter_table(module: Any) -> dict[str, Any]:
    """Return the table of a module's own parameters; changes to it take effect.

    Why: for one forward pass a parameter is replaced by another tensor (its shard, or a view of
    it). `register_parameter` takes a Parameter only, and `torch.func.functional_call` would run the
    module's hooks again.
    Holds: torch 2.11 to 2.13.
    """
    return module._parameters


def module_table(module: Any) -> dict[str, Any]:
    """Return the table of a module's own children; changes to it take effect.

    Why: for one forward pass a list of children is replaced by a part of it. Assignment would
    register the part.
    Holds: torch 2.11 to 2.13.
    """
    return module._modules


def buffer_table(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the table of a module's own buffers; changes to it take effect.

    Why: the table is copied, and restored together with the attributes after a module was probed.
    Holds: torch 2.11 to 2.13.
    """
    return module._buffers


def restore_attributes(module: nn.Module, attributes: Mapping[str, Any], buffers: dict[str, Tensor | None]) -> None:
    """Set the attributes and the table of buffers of a module, and remove all others.

    Why: a rotary module that was probed has new attributes and other buffers, and no public call
    restores both.
    Holds: torch 2.11 to 2.13.
    """
    vars(module).clear()
    vars(module).update(attributes, _buffers=buffers)


def saved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of a module's own buffers that its `state_dict` includes.

    Why: `state_dict` mixes them with the parameters, and runs the module's hooks.
    Holds: torch 2.11 to 2.13.
    """
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def hook_tables(module: nn.Module) -> list[dict[int, Callable[..., Any]]]:
    """Return the tables of a module's hooks, forward and backward; changes to them take effect.

    Why: hooks of the program are set aside while a model is probed on the meta device. torch
    returns a handle to the caller that registers a hook, but has no public list of hooks.
    Holds: torch 2.11 to 2.13.
    """
    return [vars(module)[kind] for kind in _HOOK_TABLES]


def is_compiled(model: object) -> bool:
    """Return whether `torch.compile` has wrapped a model.

    Why: the class of the wrapper has a name in private modules only.
    Holds: torch 2.11 to 2.13.
    """
    return hasattr(model, "_orig_mod")


def become(module: nn.Module, kind: type[nn.Module]) -> None:
    """Make one module an instance of another class, in place. Its mixins stay.

    Why: names, owners, hooks and parameters stay, and no other module of its class changes. A new
    module would have to replace the old one wherever that is referenced.
    Holds: torch 2.11 to 2.13.
    """
    mixed = [vars(base)[_MIXIN] for base in type(module).__mro__ if _MIXIN in vars(base)]
    module.__class__ = kind
    for mixin, attributes in reversed(mixed):
        mix_in(module, mixin, **attributes)


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module without the mixins that `mix_in` has added.

    Why: as for `become`.
    Holds: torch 2.11 to 2.13.
    """
    kind = type(module)
    while _MIXIN in vars(kind):
        _, kind = kind.__bases__
    return kind


def mix_in(module: nn.Module, mixin: type, **attributes: Any) -> None:
    """Change the class of one module, in place, to one that derives from `mixin` and its own class.

    The new class has the same name. Modules of one class that get the same share it, because
    torch.compile compiles the same layer again for another class, and gives up after a few.

    Why: as for `become`; the forward of its own class still runs, inside that of the mixin.
    Holds: torch 2.11 to 2.13.
    """
    kind = type(module)
    is_shared = {type(value) for value in attributes.values()} <= _SHARED
    key = (kind, mixin, *sorted(attributes.items())) if is_shared else None
    mixed = _MIXED.get(key)
    if mixed is None:
        mixed = type(kind.__name__, (mixin, kind), {**attributes, _MIXIN: (mixin, attributes)})
        if is_shared:
            _MIXED[key] = mixed
    module.__class__ = mixed


def set_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace the forward of one module permanently.

    Why: a stage of a pipeline has other inputs and outputs than the class whose code it runs.
    Holds: torch 2.11 to 2.13.
    """
    vars(module)[_FORWARD] = forward


def own_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return the forward that was set on one module; None if it runs that of its class.

    Why: a forward that the program has set must not be silently lost when the model is cut.
    Holds: torch 2.11 to 2.13.
    """
    return vars(module).get(_FORWARD)


def restore_forward(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    """Set the forward of one module back to the result of `own_forward`.

    Why: as for `own_forward`.
    Holds: torch 2.11 to 2.13.
    """
    if forward is None:
        del vars(module)[_FORWARD]
    else:
        set_forward(module, forward)


class Unmovable:
    """Mixed into a module that cannot be moved or cast: `check_move` is called instead.

    Why: `to`, `cuda`, `float` and the like, of this module or of one around it, all call one
    private method.
    Holds: torch 2.11 to 2.13.
    """

    def check_move(self, change: Callable[[Tensor], Tensor]) -> None:
        """Raise an error if `change` really moves or casts a tensor."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.check_move(fn)
        return self


def instance_of(kind: type[T], module: nn.Module) -> T:
    """Return a module of a class that shares everything with another module except forward hooks.

    Why: the class that FSDP2 gives a module builds something else, and the hooks belong to that
    module alone.
    Holds: torch 2.11 to 2.13.
    """
    shared = object.__new__(kind)
    vars(shared).update(vars(module))
    for name in vars(module):
        if _FORWARD in name and "hooks" in name:
            vars(shared)[name] = OrderedDict()
    return shared
