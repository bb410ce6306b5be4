"""torch.nn: the tables of a module, and changes to one module that its class knows nothing of."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn

_HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_FORWARD = "forward"
T = TypeVar("T", bound=nn.Module)


def parameter_table(module: Any) -> dict[str, Any]:
    """Return the table in which a module looks up its own parameters; changes to it count.

    Why: for one forward pass a parameter is shown as another tensor (its shard, or a view of it). `register_parameter`
    takes a Parameter only, and `torch.func.functional_call` would run the module with its hooks once more.
    Holds: torch 2.11 to 2.13.
    """
    return module._parameters


def buffer_table(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the table in which a module looks up its own buffers; changes to it count.

    Why: it is copied and put back as a whole, together with the attributes, after a module was probed.
    Holds: torch 2.11 to 2.13.
    """
    return module._buffers


def restore_attributes(module: nn.Module, attributes: Mapping[str, Any], buffers: dict[str, Tensor | None]) -> None:
    """Give a module exactly these attributes and this table of buffers.

    Why: a rotary module that was probed has new attributes and other buffers, and no public call takes both back.
    Holds: torch 2.11 to 2.13.
    """
    vars(module).clear()
    vars(module).update(attributes, _buffers=buffers)


def saved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of a module's own buffers that its `state_dict` has.

    Why: `state_dict` has them among the parameters, and runs the module's hooks.
    Holds: torch 2.11 to 2.13.
    """
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def hook_tables(module: nn.Module) -> list[dict[int, Callable[..., Any]]]:
    """Return the tables of a module's hooks, forward and backward; changes to them count.

    Why: hooks of the program are set aside while a model is probed on the meta device. torch gives handles to whoever
    registers a hook, and no list of them to others.
    Holds: torch 2.11 to 2.13.
    """
    return [vars(module)[kind] for kind in _HOOK_TABLES]


def is_compiled(model: object) -> bool:
    """Tell whether `torch.compile` has wrapped a model.

    Why: torch names the class of the wrapper in private modules only.
    Holds: torch 2.11 to 2.13.
    """
    return hasattr(model, "_orig_mod")


def become(module: nn.Module, kind: type[nn.Module]) -> None:
    """Make one module an instance of another class, in place.

    Why: names, owners, hooks and parameters stay, and no other module of its class is changed. A new module would have
    to be put in the place of the old one wherever that is known.
    Holds: torch 2.11 to 2.13.
    """
    module.__class__ = kind


def mix_in(module: nn.Module, mixin: type, **attributes: Any) -> None:
    """Let one module be of a class that derives from `mixin` and from its own class, of the same name, in place.

    Why: as for `become`; the forward of its own class still runs, inside of that of the mixin.
    Holds: torch 2.11 to 2.13.
    """
    kind = type(module)
    module.__class__ = type(kind.__name__, (mixin, kind), attributes)


def set_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give one module a forward of its own, for as long as it lives.

    Why: a stage of a pipeline takes and gives other tensors than the class does whose code it runs.
    Holds: torch 2.11 to 2.13.
    """
    vars(module)[_FORWARD] = forward


def own_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return the forward that was put into one module; None if it runs that of its class.

    Why: what a program has put there must not be lost without a word when the model is cut.
    Holds: torch 2.11 to 2.13.
    """
    return vars(module).get(_FORWARD)


@contextmanager
def forwards_replaced(modules: Iterable[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    """Let modules run another forward while the block runs; each has afterwards what it had before.

    Why: a probe of the whole model must not compute its layers.
    Holds: torch 2.11 to 2.13.
    """
    kept = [(module, own_forward(module)) for module in modules]
    for module, _ in kept:
        set_forward(module, forward)
    try:
        yield
    finally:
        for module, before in kept:
            if before is None:
                del vars(module)[_FORWARD]
            else:
                set_forward(module, before)


class Unmovable:
    """Mixed into a module that cannot be moved or cast: `check_move` is asked instead.

    Why: `to`, `cuda`, `float` and the like, of this module or of one around it, all come to one private method.
    Holds: torch 2.11 to 2.13.
    """

    def check_move(self, change: Callable[[Tensor], Tensor]) -> None:
        """Raise if `change`, which moves or casts a tensor, is more than nothing."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.check_move(fn)
        return self


def instance_of(kind: type[T], module: nn.Module) -> T:
    """Return a module of a class that shares all that another module has, but no forward hooks.

    Why: FSDP2 gives a module a class that builds something else, and its hooks belong to that module alone.
    Holds: torch 2.11 to 2.13.
    """
    shared = object.__new__(kind)
    vars(shared).update(vars(module))
    for name in vars(module):
        if _FORWARD in name and "hooks" in name:
            vars(shared)[name] = OrderedDict()
    return shared
