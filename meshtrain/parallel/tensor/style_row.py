"""The facts of one style: what a row of the table of styles holds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from meshtrain.parallel.tensor.context import AppliedStyle, ModuleContext, full_parameters
from meshtrain.parallel.tensor.requirements import Requirement, require_nothing

StyleKind = Literal["replica", "projection", "lookup", "parameters", "experts", "shared input", "full sequence"]
"""What a style is for.

`replica`: any module; every process has all its parameters. `projection`: Linear or Conv1D.
`lookup`: an embedding. `parameters`: a module whose own parameters are sharded. `experts`: stacked
experts. `shared input`: a block whose input is made full once for all projections inside.
`full sequence`: a block that gets the full sequence under sequence parallelism too, which is the
style `whole_sequence`.
"""

Gradients = Literal["full", "partial", "partial if split", "bias partial if split", "summed", "rotary key summed"]
"""What a process has of the gradients of full parameters, after its backward pass.

`full`: all of them. `partial`: its part of a sum over tp. `partial if split`: its part of a sum
where hidden states are split along the sequence. `bias partial if split`: the same, for the bias
only. `summed`: all of them, because the backward pass sums the gradient of the outputs. `rotary key
summed`: all of them, because it sums that of the last outputs, and the others are used in full.
"""


@dataclass(frozen=True, kw_only=True)
class StyleRow:
    """Facts of one style.

    Attributes:
        apply: builds what changes a module in place, from the context of the module.
        used_for: modules that have the style, in Markdown for the documentation.
        effect: what the style does to them, in sentences of Markdown for the documentation.
        kind: what the style is for.
        requires: what a module must be, beyond its kind.
        shards: what is sharded of a weight: its outputs, its inputs, the rows of a table, or the
            experts of a stack. None: nothing, or what the rules of single parameters shard.
        may_be_uneven: whether shards may differ in size, as those of a vocabulary.
        four_blocks: whether the outputs are four blocks, each with a quarter of the heads.
        takes: what a projection receives: all features, an equal part, or those of the heads of
            the process.
        gives: what a process has of the outputs: all, an equal part, those of its heads, those of
            the key-value heads that it needs, or a part that is gathered unless the loss takes it
            sharded.
        gradients: which gradients of full parameters are partial.
        own_heads: whether a process computes with the parameters of its heads only.
        needs_full_sequence: whether results or gradients are right only where a process has all
            tokens.
        adapter: how a LoRA adapter is cut. `columns`: B by its outputs. `rows`: A by its inputs.
            `vocabulary`: A by the rows of a table. `full`: not at all. `shared`: not at all; next
            to columns, B stays full. `rotary key`: not at all; the gradient of the last outputs of
            B is summed. None: there can be none.
        has_parameter_rules: whether the module's own parameters can have rules.
        is_for_parameters: whether a single parameter of such a module can have this style.
        is_for_head: whether the head of a causal LM can have this style.
        transformers: names that mean this style in the plans of transformers.
    """

    apply: Callable[[ModuleContext], AppliedStyle]
    used_for: str
    effect: str
    kind: StyleKind
    requires: Requirement = require_nothing
    shards: Literal["outputs", "inputs", "rows", "experts"] | None = None
    may_be_uneven: bool = False
    four_blocks: bool = False
    takes: Literal["all", "part", "own heads"] = "all"
    gives: Literal["all", "part", "own heads", "own keys", "gathered"] = "all"
    gradients: Gradients = "full"
    own_heads: bool = False
    needs_full_sequence: bool = False
    adapter: Literal["columns", "rows", "vocabulary", "full", "shared", "rotary key"] | None = None
    has_parameter_rules: bool = False
    is_for_parameters: bool = False
    is_for_head: bool = False
    transformers: tuple[str, ...] = ()

    @property
    def takes_cut(self) -> bool:
        """Whether each process receives other features."""
        return self.takes != "all"

    @property
    def gives_cut(self) -> bool:
        """Whether each process has other outputs, until a row-wise projection sums."""
        return self.gives in ("part", "own heads", "own keys")

    @property
    def enters(self) -> bool:
        """Whether a projection makes its input full, unless the block around it has done so."""
        return self.kind == "projection" and self.gives_cut

    @property
    def sums_outputs(self) -> bool:
        """Whether the backward pass sums the gradient of outputs that all heads share."""
        return self.gradients in ("summed", "rotary key summed")

    @property
    def works_on_part(self) -> bool:
        """Whether a process works on its part of the heads or of a width, and no other part."""
        return self.takes_cut or self.gives_cut or self.gradients == "partial"

    def partial_parameters(self, module: nn.Module, context: ModuleContext) -> list[str]:
        """Return the names, inside the module, of the parameters with partial gradients.

        Args:
            module: of this style.
            context: of the module.
        """
        is_split, own = context.region.sequence_parallel, [kind for kind, _ in module.named_parameters(recurse=False)]
        if self.gradients == "partial" or (self.gradients == "partial if split" and is_split):
            return own
        if self.kind == "experts":
            # Their results are summed.
            return full_parameters(context.name, module, context.sharded_dims)
        if self.has_parameter_rules:
            return [kind for kind in own if f"{context.name}.{kind}" in context.summed]
        has_bias = getattr(module, "bias", None) is not None
        return ["bias"] if self.gradients == "bias partial if split" and is_split and has_bias else []
