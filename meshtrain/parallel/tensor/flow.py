"""Follow the parts of the heads through one forward pass on the meta device.

Each projection returns the part of one process in this pass. A parameter that every process holds
in full, but uses on its part of the heads, gets a partial gradient. Which parameters these are
depends on the configuration as well as on the class. So this module reads nothing from names. The
pass follows every tensor that is a part, and records the full parameters that are combined with it.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshtrain.compat.autograd import all_entries_nonzero, tensors_in
from meshtrain.compat.nn import parameter_table, set_forward
from meshtrain.compat.transformers import attention_implementation, set_attention_implementation
from meshtrain.config.plan import Style
from meshtrain.models.probe_inputs import PROBE_LENGTH, probe_ids, probe_mask
from meshtrain.models.rotary import probed
from meshtrain.parallel.cut.hooks import hooks_disabled
from meshtrain.parallel.cut.meta import KnownLists, WithoutValues
from meshtrain.parallel.cut.probe import (
    MISFITS,
    find_layers,
    no_router_logits,
)
from meshtrain.parallel.tensor.behavior import behavior_on_heads
from meshtrain.parallel.tensor.head_share import heads_of, uneven_heads
from meshtrain.parallel.tensor.heads import apply_local_heads, local_widths
from meshtrain.parallel.tensor.modules import see_own_heads
from meshtrain.parallel.tensor.origins import HIDDEN_STATES, SUMMED_STYLES, Flow, Parts
from meshtrain.parallel.tensor.rules import TensorRules, blocks_of
from meshtrain.parallel.tensor.styles import STYLES

# Styles of modules that have all their parameters on every process.
REPLICATED = frozenset(name for name, row in STYLES.items() if row.kind == "replica")
# Those of modules that compute as in the stock model, so that a part must reach them.
SUMMED_REPLICAS = frozenset(name for name in REPLICATED & SUMMED_STYLES if not STYLES[name].own_heads)
# Those of projections that have some outputs for all heads, whose gradient is summed, and others.
PARTLY_SUMMED = frozenset(name for name, row in STYLES.items() if row.gradients == "rotary key summed")
OWN_HEADS = frozenset(name for name, row in STYLES.items() if row.own_heads)


def follow_heads(model: PreTrainedModel, rules: TensorRules, tp: int) -> Flow:
    """Run the decoder layers as one process of `tp` would, and return what used the parts of heads.

    Args:
        model: on the meta device, unfused; it is not changed.
        rules: styles, local attributes and local inputs by module name.
        tp: number of processes that share a layer.
    """
    failure: Exception | None = None
    for every_layer, with_mask, as_tuple in itertools.product((False, True), (True, False), (False, True)):
        flow = Flow()
        calls: dict[str, list[Any]] = {}
        try:
            # The first pass has all heads. It shows the shapes, and whether the model runs with
            # these options.
            _Pass(model, rules, 1, Flow(), calls).run(every_layer=every_layer, with_mask=with_mask, as_tuple=as_tuple)
        except MISFITS as error:
            failure = failure or error
            continue
        try:
            _Pass(model, rules, tp, flow, calls).run(every_layer=every_layer, with_mask=with_mask, as_tuple=as_tuple)
        except MISFITS as error:
            flow.failure = _first_line(error)
        return flow
    assert failure is not None
    return Flow(failure=_first_line(failure), ran=False)


class _Pass:
    """One forward pass of a copy of the model, with the parts of one process of `tp`."""

    def __init__(
        self, model: PreTrainedModel, rules: TensorRules, tp: int, flow: Flow, calls: dict[str, list[Any]]
    ) -> None:
        self.rules, self.tp, self.flow = rules, tp, flow
        # Arguments that modules with full parameters received in the pass with all heads.
        self.calls, self.is_first = calls, tp == 1
        self.model = copy.deepcopy(model)
        if attention_implementation(self.model.config) not in ("eager", "sdpa"):
            # Kernels for one kind of device do not run on meta. The parts are the same with SDPA.
            set_attention_implementation(self.model.config, "sdpa")
        self.parts = Parts(flow, rules)
        # Modules whose gradient the rules sum, and that had a call with only full tensors.
        self.called: set[str] = set()
        self.layers_name, self.layers = find_layers(self.model)

    def run(self, *, every_layer: bool, with_mask: bool, as_tuple: bool) -> None:
        chosen = set(range(len(self.layers))) if every_layer else set(self._first_of_each_kind())
        with ExitStack() as stack:
            stack.enter_context(hooks_disabled(self.model))
            self._replace_modules(chosen, as_tuple=as_tuple)
            if not self.is_first:
                apply_local_heads(self.model, self.rules, rank=0, tp=self.tp)
            stack.enter_context(probed(self.model, PROBE_LENGTH))
            stack.enter_context(torch.no_grad())
            # Meta tensors do not show the expert of a token: the shapes are those of all tokens
            # going to all experts.
            stack.enter_context(all_entries_nonzero())
            stack.enter_context(KnownLists())
            stack.enter_context(WithoutValues())
            stack.enter_context(torch.random.fork_rng(devices=[]))
            # RWKV changes its weights for evaluation.
            self.model.train()
            ids = probe_ids(next(self.model.parameters()).device)
            mask = probe_mask(ids.device, with_mask=with_mask)
            stack.enter_context(self._new_modules_noted())
            with self.parts:
                self.model(input_ids=ids, **mask, **no_router_logits(self.model), use_cache=False)
        self._judge_gradients()

    def _judge_gradients(self) -> None:
        """Note full parameters whose gradient is complete but summed, or complete only in part."""
        on_parts, in_full = self.parts.used_on_parts, self.parts.used_in_full
        summed = self.called | {name for name in in_full & self.parts.blocks.keys() if self.parts.is_summed(name)}
        self.flow.counted_twice.update(dict.fromkeys(sorted(summed - on_parts)))
        both = {name for name in on_parts & in_full if self.rules.styles.get(name) not in PARTLY_SUMMED}
        for name in sorted(both - {HIDDEN_STATES}):
            self.flow.mixed[name] = None
            self.flow.partial.pop(name, None)

    @contextmanager
    def _new_modules_noted(self) -> Iterator[None]:
        before = dict(self.model.named_modules())
        try:
            yield
        finally:
            new = (name for name, module in self.model.named_modules() if before.get(name) is not module)
            self.flow.replaced.update(dict.fromkeys(new))

    def _first_of_each_kind(self) -> Iterator[int]:
        """Yield the index of the first layer of each kind.

        A kind has the same layer type in the configuration, modules, parameters and rules.
        """
        words = getattr(self.model.config.get_text_config(), "layer_types", None) or ()
        seen = set()
        for index, layer in enumerate(self.layers):
            prefix = f"{self.layers_name}.{index}"
            kind = (
                words[index] if index < len(words) else None,
                tuple(type(module) for module in layer.modules()),
                tuple((name, p.shape) for name, p in layer.named_parameters()),
                tuple(self.rules.styles.get(f"{prefix}.{name}") for name, _ in layer.named_modules()),
                tuple(self._rule_of_parameter(f"{prefix}.{name}") for name, _ in layer.named_parameters()),
            )
            if kind not in seen:
                seen.add(kind)
                yield index

    def _rule_of_parameter(self, name: str) -> tuple[int | None, bool]:
        return self.rules.sharded_dims.get(name), name in self.rules.summed

    def _replace_modules(self, chosen: set[int], *, as_tuple: bool) -> None:
        def skip(*args: Any, **kwargs: Any) -> Any:
            hidden = torch.empty_like(args[0] if args else kwargs["hidden_states"])
            return (hidden,) if as_tuple else hidden

        for index, layer in enumerate(self.layers):
            if index not in chosen:
                set_forward(layer, skip)
                continue
            name = f"{self.layers_name}.{index}"
            self._replace_inside(name, layer)
            set_forward(layer, partial(self._run_layer, layer.forward))

    def _replace_inside(self, prefix: str, layer: nn.Module) -> None:
        stopped: list[str] = []
        for below, module in layer.named_modules(prefix=prefix):
            if any(below.startswith(f"{name}.") for name in stopped):
                continue
            style = self.rules.styles.get(below)
            kind = None if style is None else STYLES[style].kind
            if (stub := self._stub_for(below, module, style)) is not None:
                stopped.append(below)
                for _, parameter in module.named_parameters():
                    self.parts.add_sharded(parameter, below)
                set_forward(module, stub)
            elif kind == "shared input":
                self._take_own_parameters(below, module)
                set_forward(module, partial(self._enter, below, module.forward))
            elif self._is_replicated(below, module):
                stopped.append(below)
                for name, parameter in module.named_parameters(prefix=below):
                    self.parts.add_full(parameter, name.rpartition(".")[0])
                set_forward(module, partial(self._run_replicated, below, copy.deepcopy(module), module.forward))
            else:
                self._take_own_parameters(below, module)

    def _is_replicated(self, name: str, module: nn.Module) -> bool:
        """Return whether a module has parameters, and none of them is sharded."""
        inside = {self.rules.styles.get(below) for below, m in module.named_modules(prefix=name) if _owns(m)}
        return bool(inside) and inside <= {*REPLICATED, None} and name != ""

    def _stub_for(self, name: str, module: nn.Module, style: Style | None) -> Callable[..., Any] | None:
        row = None if style is None else STYLES[style]
        if row is None or row.kind not in ("projection", "experts"):
            return None
        if row.kind == "experts":
            return self._experts
        inputs, outputs = local_widths(module, row, heads_of(self.model.config), 0, self.tp)
        if row.gives_cut:
            block = next(blocks_of(name, self.rules.styles, "shared input"), None)
            return partial(self._project, None, inputs, outputs, block=block)
        return partial(self._project, name if row.sums_outputs else HIDDEN_STATES, inputs, outputs)

    def _project(self, origin: str | None, inputs: int, outputs: int, x: Tensor, block: str | None = None) -> Tensor:
        """Return an output of full features from `origin`, or a part of them if that is None.

        Args:
            block: that makes `x` full, if there is one.
        """
        if block is not None and not self.parts.is_part(x):
            self.flow.unentered[block] = None
        if x.shape[-1] != inputs:
            raise ValueError(f"a projection gets {x.shape[-1]} inputs where it has {inputs}")
        self.parts.leave(x)
        result = torch.empty(*x.shape[:-1], outputs, dtype=x.dtype, device=x.device)
        return self.parts.add_part(result) if origin is None else self.parts.add_full(result, origin)

    def _experts(self, *args: Any, **kwargs: Any) -> Tensor:
        inputs = tensors_in((args, kwargs))
        self.parts.leave(*inputs)
        return self.parts.add_full(torch.empty_like(inputs[0]), HIDDEN_STATES)

    def _take_own_parameters(self, name: str, module: nn.Module) -> None:
        for kind, parameter in list(module.named_parameters(recurse=False)):
            dim = self.rules.sharded_dims.get(f"{name}.{kind}")
            if dim is None:
                self.parts.blocks[f"{name}.{kind}"] = name
                self.parts.add_full(parameter, f"{name}.{kind}")
                continue
            own = parameter.detach().narrow(dim, 0, parameter.shape[dim] // self.tp).clone()
            module.register_parameter(kind, nn.Parameter(own))
            self.parts.add_part(parameter_table(module)[kind])

    def _enter(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        full = args[0] if args else kwargs["hidden_states"]
        self.parts.leave(full)
        hidden = self.parts.add_part(torch.empty_like(full))
        output = forward(hidden, *args[1:], **kwargs) if args else forward(**{**kwargs, "hidden_states": hidden})
        if any(map(self.parts.is_part, tensors_in(output)[:1])):
            self.flow.leaking[name] = None
        return output

    def _run_layer(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        hidden = self.parts.add_full(torch.empty_like(args[0] if args else kwargs["hidden_states"]), HIDDEN_STATES)
        output = forward(hidden, *args[1:], **kwargs) if args else forward(**{**kwargs, "hidden_states": hidden})
        self.parts.leave(*tensors_in(output)[:1])
        if any(self.parts.is_part(tensor) for tensor in tensors_in(output)[:1]):
            self.flow.partial[HIDDEN_STATES] = None
        return output

    def _run_on_full(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except MISFITS:
            # A loop over experts does not run on meta. Its result has the shape of its input.
            return self._experts(*args, **kwargs)

    def _run_replicated(
        self, name: str, stock: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if not any(map(self.parts.is_part, tensors_in((args, kwargs)))):
            owners = (below for below, module in stock.named_modules(prefix=name) if _owns(module))
            self.called |= {owner for owner in owners if self.rules.styles.get(owner) in SUMMED_REPLICAS}
            return self._run_on_full(forward, *args, **kwargs)
        calls = self.calls.setdefault(name, [])
        if self.is_first:
            calls.append((args, kwargs))
            return forward(*args, **kwargs)
        behavior = behavior_on_heads(stock, calls.pop(0), (args, kwargs))
        if behavior == "alike":
            owners = (below for below, module in stock.named_modules(prefix=name) if _owns(module))
            self.flow.on_parts.update(dict.fromkeys(owners))
            return forward(*args, **kwargs)
        if behavior == "joint":
            self.flow.joint[name] = None
            return self.parts.add_part(torch.empty_like(tensors_in((args, kwargs))[0]))
        if self.rules.styles.get(name) not in OWN_HEADS:
            self.flow.per_head[name] = None
        see_own_heads(stock, 0, self.tp, uneven_heads(self.model.config, self.tp))
        return stock(*args, **kwargs)


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _owns(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))
