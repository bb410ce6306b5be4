"""Flags of a configuration that change what a model computes, and variants with them."""

import itertools
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union

import torch
from transformers import PretrainedConfig, PreTrainedModel

from meshtrain.compat.autograd import OperatorMode, map_tensors, memory_of
from meshtrain.errors import UserError
from meshtrain.models.build import build_meta_model
from meshtrain.models.probe_inputs import PROBE_LENGTH, probe_ids, probe_mask
from meshtrain.models.rotary import probed
from meshtrain.models.tiny import KEY_VALUE_HEADS, default_config, shrink
from meshtrain.parallel.cut.probe import MISFITS, no_router_logits
from meshtrain.parallel.tiny_copy import MAX_LAYERS, copy_with_all_kinds, layer_kinds

Values = Mapping[str, Any]
# These select what a forward pass returns, or make a model that is not a causal language model.
NOT_FLAGS = {
    *("return_dict", "output_hidden_states", "output_attentions", "torchscript", "use_cache", "is_decoder"),
    *("is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder", "tf_legacy_loss", "use_bfloat16"),
}
FEW = 1


@dataclass(frozen=True)
class Flags:
    """The flags of a model type.

    Attributes:
        values: flag that changes what the model computes -> its values, the default first.
        silent: flags that change nothing, neither alone nor with one of the others.
    """

    values: dict[str, tuple[Any, ...]]
    silent: tuple[str, ...]


def flags_text(values: Values) -> str:
    """Return flags as text, as a user writes them."""
    return ", ".join(f"{name} = {value}" for name, value in values.items())


def attention_heads(config: PretrainedConfig) -> int | None:
    """Return the number of attention heads; None if layers differ or there are none."""
    # Attributes are not read, because some configurations have values per layer and raise an error.
    number = config.to_dict().get(config.attribute_map.get("num_attention_heads", "num_attention_heads"))
    return number if isinstance(number, int) else None


def candidates(config: PretrainedConfig) -> dict[str, tuple[Any, ...]]:
    """Return every boolean, choice and number of groups of a configuration: name -> values.

    The configuration's own value comes first.
    """
    hints = _hints(type(config))
    found: dict[str, tuple[Any, ...]] = {}
    heads = attention_heads(config)
    for name, value in config.to_dict().items():
        if name in NOT_FLAGS or name.startswith("_"):
            continue
        if choices := _choices(hints.get(name)):
            found[name] = tuple(dict.fromkeys((value, *choices)))
        elif isinstance(value, bool):
            found[name] = value, not value
        elif value is None and bool in (hints.get(name), *typing.get_args(hints.get(name))):
            found[name] = None, True, False
        elif config.attribute_map.get("num_key_value_heads", name) == name and name in KEY_VALUE_HEADS:
            if isinstance(heads, int) and isinstance(value, int):
                some = (heads // 4,) if heads % 4 == 0 else ()
                found[name] = tuple(dict.fromkeys((value, FEW, *some, heads)))
        elif value == 1 and isinstance(value, int) and "token" not in name and "layer" not in name:
            # A number of parts, such as `pretraining_tp` of BLOOM.
            found[name] = 1, 2
    return found


def find_flags(model_type: str) -> Flags:
    """Return which candidates change what the model of a type computes, alone or in pairs.

    Raises:
        ModelError: if there is no tiny copy of the type with all its kinds of layers.
    """
    offered = candidates(default_config(model_type))
    signatures = _Signatures(model_type)
    plain = signatures.of({})
    changing = {
        name: tuple(value for value in values if value == values[0] or signatures.of({name: value}) != plain)
        for name, values in offered.items()
    }
    silent = [name for name, values in changing.items() if len(values) == 1]
    for one, other in itertools.combinations(silent, 2):
        for pair in _pairs(one, offered[one], other, offered[other]):
            if signatures.of(pair) not in (plain, None):
                changing |= {name: offered[name] for name in pair}
    # A flag may matter only where another one has another value.
    for other, values in [(name, values) for name, values in changing.items() if len(values) > 1]:
        for name in [name for name, values in changing.items() if len(values) == 1]:
            for pair in _pairs(other, values, name, offered[name]):
                if signatures.of(pair) not in (signatures.of({other: pair[other]}), None):
                    changing[name] = offered[name]
    return Flags(
        {name: values for name, values in changing.items() if len(values) > 1},
        tuple(name for name, values in changing.items() if len(values) == 1),
    )


def _pairs(one: str, of_one: Sequence[Any], other: str, of_other: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Yield all pairs of values other than the defaults."""
    for a, b in itertools.product(of_one[1:], of_other[1:]):
        yield {one: a, other: b}


def cover_pairs(
    values: Mapping[str, Sequence[Any]], is_possible: Callable[[Values], bool]
) -> tuple[list[Values], list[Values]]:
    """Return variants that cover each pair of values, and the impossible values and pairs.

    Args:
        values: flag -> its values, the default first.
        is_possible: returns whether there is a variant with these flags and defaults for the
            others.
    """
    alone = [{name: value} for name, found in values.items() for value in found[1:]]
    impossible: list[Values] = [single for single in alone if not is_possible(single)]
    allowed = {name: [v for v in found if {name: v} not in impossible] for name, found in values.items()}
    pairs = [
        {one: a, other: b}
        for one, other in itertools.combinations(allowed, 2)
        for a in allowed[one]
        for b in allowed[other]
    ]
    # With one flag there are no pairs, so its values are covered alone.
    open_pairs = pairs or [{name: value} for name, found in allowed.items() for value in found]
    default = {name: found[0] for name, found in allowed.items()}
    variants: list[Values] = [default]
    open_pairs = [pair for pair in open_pairs if not pair.items() <= default.items()]
    while open_pairs:
        best = _grow(default, allowed, open_pairs, is_possible)
        if best is None:
            impossible.append(open_pairs.pop(0))
            continue
        variants.append(best)
        open_pairs = [pair for pair in open_pairs if not pair.items() <= best.items()]
    return [_changed(variant, default) for variant in variants], impossible


def _grow(
    default: Values,
    allowed: Mapping[str, Sequence[Any]],
    open_pairs: Sequence[Values],
    is_possible: Callable[[Values], bool],
) -> Values | None:
    """Return a variant with the first open pair and as many others as possible, or None."""
    grown = {**default, **open_pairs[0]}
    if not is_possible(_changed(grown, default)):
        return None
    for name in allowed.keys() - open_pairs[0].keys():
        ranked = sorted(allowed[name], key=lambda v: -_covered({**grown, name: v}, open_pairs))
        for value in ranked:
            trial = {**grown, name: value}
            if value == grown[name] or is_possible(_changed(trial, default)):
                grown = trial
                break
    return grown


def _covered(variant: Values, pairs: Sequence[Values]) -> int:
    return sum(pair.items() <= variant.items() for pair in pairs)


def _changed(variant: Values, default: Values) -> Values:
    return {name: value for name, value in variant.items() if value != default[name]}


class _Signatures:
    """What tiny models of a type compute, to see what flags change.

    Args:
        model_type: of a language model.

    Raises:
        ModelError: if there is no tiny copy with all kinds of layers.
    """

    def __init__(self, model_type: str) -> None:
        config = default_config(model_type)
        # Some flags show only where a model has two layers of a kind.
        self._num_layers, _, _ = copy_with_all_kinds(
            layer_kinds(_build(config)),
            range(4, MAX_LAYERS + 1),
            lambda number, **_: shrink(config, number, in_turn=True),
            _build,
        )
        self._type = model_type
        self._known: dict[tuple[tuple[str, Any], ...], object] = {}

    def of(self, changes: Values) -> object:
        """Return structure and operations of a model, without its values; None if it has no copy.

        That is its modules, the shapes of its parameters, the kinds of its layers, and every
        operation of a forward pass on meta.
        """
        key = tuple(sorted(changes.items()))
        if key not in self._known:
            self._known[key] = self._compute(changes)
        return self._known[key]

    def _compute(self, changes: Values) -> object:
        try:
            config = shrink(default_config(self._type, changes), self._num_layers, in_turn=True)
            return _signature(_build(config))
        except UserError:
            return None


def _build(config: PretrainedConfig) -> PreTrainedModel:
    return build_meta_model(config, dtype=torch.float32, attention="eager").eval()


def _signature(model: PreTrainedModel) -> object:
    modules = tuple((name, type(module).__name__) for name, module in model.named_modules())
    shapes = tuple((name, p.shape) for name, p in model.named_parameters(remove_duplicate=False))
    layer_types = tuple(getattr(model.config, "layer_types", None) or ())
    traces = []
    for with_mask in (True, False):
        with _Operations() as operations, torch.no_grad(), probed(model, PROBE_LENGTH):
            ids = probe_ids(torch.device("meta"))
            try:
                model(
                    input_ids=ids,
                    **probe_mask(ids.device, with_mask=with_mask),
                    **no_router_logits(model),
                    use_cache=False,
                )
            except MISFITS as error:
                operations.seen.append(type(error).__name__)
        traces.append(tuple(operations.seen))
    return modules, shapes, tuple(model.all_tied_weights_keys), layer_types, tuple(traces)


class _Operations(OperatorMode):
    """Records every operation, with its numbers, and the shape and origin of each tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        # The tensors are kept so that their memory is not used again for others.
        self._order: dict[int, tuple[int, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen.append(f"{func} {map_tensors(self._name, (args, kwargs, result))}")
        return result

    def _name(self, tensor: torch.Tensor) -> str:
        number, _ = self._order.setdefault(memory_of(tensor), (len(self._order), tensor))
        return f"{number}{tuple(tensor.shape)}"


def _hints(config_class: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(config_class)
    except NameError:
        # A class that comes with a model may use names that exist for type checkers only.
        return {}


def _choices(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    if typing.get_origin(hint) in (Union, UnionType):
        return tuple(itertools.chain.from_iterable(_choices(part) for part in typing.get_args(hint)))
    return ()
