"""The plan file: everything about how a model is parallelized, and nothing else."""

from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from meshtrain.config.mesh import Degree, MeshPlan
from meshtrain.config.schedules import ScheduleName
from meshtrain.config.settings import LARGEST, Count, NotNegative, Settings
from meshtrain.errors import ConfigError

Dtype = Literal["float32", "bfloat16", "float64"]
ComputeDtype = Literal["float32", "bfloat16", "float16", "float64", "float8"]
Float8Recipe = Literal["rowwise", "tensorwise", "mxfp8"]


class EightBits(NamedTuple):
    """A number format of products that not all devices multiply in.

    Attributes:
        setting: of a plan that asks for it.
        instead: what to do without it.
    """

    setting: str
    instead: str


EIGHT_BITS = {
    "float8": EightBits("plan.precision.compute = 'float8'", "compute in bfloat16"),
    "mxfp8": EightBits("plan.precision.float8.recipe = 'mxfp8'", "take the recipe 'rowwise'"),
}
"""By the name that `PrecisionPlan.products` has for them."""
ContextMethod = Literal["ulysses", "all_gather"]
ContextOrder = Literal["contiguous", "head_tail"]
Style = Literal[
    "colwise",
    "colwise_gather_output",
    "rowwise",
    "embedding_rowwise",
    "sequence_parallel",
    "replicate",
    "replicated_with_grad_allreduce",
    "shared_input",
    "rowwise_split_input",
    "replicated_heads",
    "colwise_heads",
    "rowwise_heads",
    "per_head",
    "colwise_blocks",
    "mla_kv_a_proj",
    "shared_outputs",
    "local_params",
    "moe_tp_experts",
    "expert_parallel",
    "whole_sequence",
]
# A loss scale doubles until gradients overflow, and small losses let it grow far.
Scale = Annotated[float, Field(gt=0.0, le=2.0**100, allow_inf_nan=False)]
# (parameters, compute) -> allowed formats of the reduction. Other combinations lose accuracy or
# have no effect.
PRECISIONS: dict[tuple[str, str], tuple[str, ...]] = {
    ("float32", "float32"): ("float32",),
    ("float32", "bfloat16"): ("float32", "bfloat16"),
    ("float32", "float16"): ("float32",),
    ("float32", "float8"): ("float32", "bfloat16"),
    ("bfloat16", "bfloat16"): ("float32", "bfloat16"),
    ("bfloat16", "float8"): ("float32", "bfloat16"),
    ("float64", "float64"): ("float64",),
}


class PipelinePlan(Settings):
    """How the model is cut into pipeline stages, and in what order the stages work."""

    schedule: ScheduleName = "1F1B"
    """Order of the forward and backward passes. The names are those of torch."""
    stages_per_rank: Degree = 1
    """Stages held by one process. Schedules that do not interleave need 1, those in a V need 2."""
    layers_per_stage: Literal["balanced", "even"] | list[NotNegative] = "balanced"
    """`balanced` makes the slowest stage as fast as possible, counted in FLOPs. `even` gives
    each stage the same number of layers. A list gives the number of layers of each stage."""
    split_at: list[str] | None = None
    """Names of the first layer of each stage, without the first stage. Replaces
    `layers_per_stage`."""

    @property
    def layer_counts(self) -> list[int]:
        """Return the number of layers of each stage of a resolved plan."""
        assert isinstance(self.layers_per_stage, list), "the plan is not resolved"
        return self.layers_per_stage


class TensorPlan(Settings):
    """How modules are sharded over the tp axis."""

    sequence_parallel: bool = False
    """Keep only this process's part of the sequence between attention and MLP. `tp` must divide
    the sequence length."""
    async_tp: bool = False
    """Cut the messages of `sequence_parallel` and the matrix products beside them into pieces, and
    send one piece while another is multiplied. Inductor does this to compiled layers, by symmetric
    memory: it needs `compile.enabled` and GPUs of one machine that reach each other's memory."""
    loss_parallel: bool = True
    """Keep the logits sharded over the vocabulary, and compute the loss on the shards."""
    experts: Literal["tensor", "expert"] = "tensor"
    """How derived rules cut experts: `tensor` shards each expert over tp, `expert` gives each
    process whole experts."""
    auto: bool = False
    """Derive the rules that are missing for this model. A rule that matches nothing then
    belongs to another variant of the family, and is not an error."""
    styles: dict[str, Style] = {}
    """Module pattern -> style. `*` stands for one layer number. Every parameter needs exactly
    one rule when tp > 1. Without any rule, those of the shipped family are used; without a
    family, those of the plan that the model has in transformers, or derived ones."""
    fused: dict[str, list[str] | dict[str, int | str]] = {}
    """Pattern of a fused projection (such as GPT-2's `c_attn`) or of stacked experts -> names
    of its equal parts. Parts of different sizes are a table: part -> its share, as a number or
    as the name of one in the model's configuration."""
    local_attributes: dict[str, list[str]] = {}
    """Module pattern -> attributes that hold a whole width, and must hold only the width of
    this process's part."""
    local_inputs: dict[str, list[str]] = {}
    """Module pattern -> inputs that hold one value for each attention head, such as ALiBi. Each
    process takes those of its heads."""


class ContextPlan(Settings):
    """How attention sees full sequences over the cp axis."""

    method: Literal["auto"] | ContextMethod = "auto"
    """`ulysses` exchanges heads: each process computes attention for some heads and the full
    sequence, so cp must divide the number of heads on a process. `all_gather` gives each process
    all keys and values. `auto` is `ulysses` where it fits, because all processes then have the
    same work, and plain causal attention needs no mask."""
    order: Literal["auto"] | ContextOrder = "auto"
    """Which part of a sequence a process has. `contiguous` is one piece. `head_tail` is one from
    the start and one from the end, which gives all processes the same work in `all_gather`.
    `auto` is `head_tail` for `all_gather`, and `contiguous` for `ulysses`."""


class AttentionPlan(Settings):
    """How attention of a run keeps packed documents apart (`data.documents` = "separate")."""

    documents: Literal["auto", "segments", "mask"] = "auto"
    """`segments` computes each document alone, so the pairs of tokens of different documents cost
    nothing. `mask` computes all pairs of a row and throws those away. `auto` is `segments` for a
    class that computes the same with both on a tiny copy."""


class ShardPlan(Settings):
    """Sharding of parameters, gradients and optimizer state over dp_shard, ep and cp (FSDP2)."""

    level: Literal[1, 2, 3] = 3
    """What each process holds only its part of, as in ZeRO: 1 the optimizer state, 2 also the
    gradients, 3 also the parameters. The master copy of the parameters is always sharded. At levels
    1 and 2, full parameters in the number format of the computation are kept from the first forward
    pass of a step to the last backward pass."""
    reshard_after_forward: Literal["auto", "always", "never"] = "auto"
    """Whether gathered parameters are freed after each pass of a layer. `auto` is `never` at levels
    1 and 2, with a pipeline or without sharding, and `always` otherwise."""
    reduce_gradients: Literal["auto", "each_step", "each_microbatch"] = "auto"
    """When gradients are summed over processes. `each_step` sends them once per step, and until
    then keeps full gradients. `each_microbatch` keeps only this process's part of them, and sends
    them once per microbatch. `auto` is `each_microbatch` at level 2, and `each_step` otherwise. In
    a program without a pipeline, every backward pass reduces."""
    prefetch: Literal["implicit"] | Count = "implicit"
    """Number of layers that are gathered ahead of the one that computes, in both directions.
    `implicit` leaves it to FSDP2: on a GPU, one layer ahead as long as the host is ahead of it."""
    offload: Literal["none", "cpu"] = "none"
    """`cpu` keeps parameters, gradients and optimizer state in host memory, where the optimizer
    also runs. Gathered parameters are on the GPU. Without an accelerator this changes nothing."""

    @property
    def reduces_each_microbatch(self) -> bool:
        """Return whether a resolved plan reduces gradients in every backward pass."""
        return self.reduce_gradients == "each_microbatch"


class LossScalePlan(Settings):
    """Dynamic loss scaling for `compute` = "float16". Without it, small gradients would round
    to zero.

    A step whose gradients overflow changes no parameter. It counts neither for the learning
    rate nor for AdamW.
    """

    initial: Scale = 65536.0
    """Initial scale. The loss is multiplied by the scale, and the gradients are divided by it
    before they are used."""
    growth_interval: Count = 2000
    """Number of steps without an overflow after which the scale grows."""
    growth_factor: Annotated[float, Field(gt=1.0, le=LARGEST, allow_inf_nan=False)] = 2.0
    """Factor by which the scale grows."""
    backoff_factor: Annotated[float, Field(gt=0.0, lt=1.0, allow_inf_nan=False)] = 0.5
    """Factor by which the scale is multiplied after an overflow."""
    hysteresis: Count = 2
    """Number of overflows since the scale last grew that are needed to lower it. Each further
    overflow lowers it again."""
    minimum: Scale = 1.0
    """Lowest scale. An overflow at this scale stops the run."""

    @model_validator(mode="after")
    def _starts_in_its_range(self) -> Self:
        if self.initial < self.minimum:
            raise ConfigError(
                f"`initial` = {self.initial} is below `minimum` = {self.minimum}", "raise one or lower it"
            )
        return self


class Float8Plan(Settings):
    """Matrix products in float8, for `compute` = "float8".

    The inputs, weights and output gradients of linear layers in the decoder layers are scaled and
    cast to float8 before their products. The numbers of inputs and outputs of a layer on a process
    must be multiples of 16, with `mxfp8` of 32; other layers stay in bfloat16. So do the head and
    stacked experts.
    """

    recipe: Float8Recipe = "rowwise"
    """`rowwise` scales each row and column of a product by itself, in e4m3. `tensorwise` has one
    scale for a tensor on a process, which is faster, and gradients in e5m2; FSDP2 then gathers
    weights in float8. `mxfp8` scales blocks of 32 values in e4m3, which GPUs multiply from compute
    capability 10.0 (Blackwell) on."""
    skip: list[str] | None = None
    """Patterns of modules that stay in bfloat16, with all linear layers inside. Left out: the
    first and the last decoder layer."""


class PrecisionPlan(Settings):
    """Number formats of parameters, of the computation and of the reduction of gradients."""

    parameters: Dtype = "float32"
    """Number format of parameters, and of optimizer state unless `optimizer.state` of the run is
    another."""
    compute: ComputeDtype = "float32"
    """Number format of the forward and backward passes. `float16` always uses dynamic loss
    scaling. `float8` is bfloat16, with the matrix products of linear layers in float8."""
    reduce: Dtype = "float32"
    """Number format in which gradients are summed over microbatches and over the data-parallel
    axes. Where each microbatch reduces its gradients, and dp_replicate is 1, the sum over
    microbatches is in the format of the parameters."""
    loss_scale: LossScalePlan = LossScalePlan()
    """Dynamic loss scaling, for `compute` = "float16" only."""
    float8: Float8Plan = Float8Plan()
    """Matrix products in float8, for `compute` = "float8" only."""

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.reduce not in PRECISIONS.get((self.parameters, self.compute), ()):
            possible = "; ".join(
                f"{parameters}, {compute}, {' or '.join(reduce)}"
                for (parameters, compute), reduce in PRECISIONS.items()
            )
            raise ConfigError(
                f"`parameters` = {self.parameters!r}, `compute` = {self.compute!r} and `reduce` = {self.reduce!r} do "
                "not fit together",
                f"in this order, possible values are: {possible}",
            )
        if self.compute != "float16" and self.loss_scale != LossScalePlan():
            raise ConfigError(
                f"`loss_scale` is for `compute` = 'float16', found {self.compute!r}",
                "leave it out, or compute in float16",
            )
        if self.compute != "float8" and self.float8 != Float8Plan():
            raise ConfigError(
                f"`float8` is for `compute` = 'float8', found {self.compute!r}", "leave it out, or compute in float8"
            )
        return self

    @property
    def activations(self) -> str:
        """Return the number format of activations and gathered parameters."""
        return "bfloat16" if self.compute == "float8" else self.compute

    @property
    def products(self) -> str:
        """Return the number format of the products of linear layers: `compute`, or mxfp8."""
        return "mxfp8" if self.float8.recipe == "mxfp8" else self.compute


class RecomputePlan(Settings):
    """Activations that are dropped in the forward pass and computed again in the backward pass."""

    mode: Literal["none", "full", "selective"] = "none"
    """`full` keeps only the input of a layer. `selective` also keeps the results of its matrix
    products, of its attention and of its collectives. With tp it keeps the partial sums before
    the collectives too, and so saves less memory."""
    every: Count = 1
    """Recompute every k-th layer. The other layers keep all activations."""


class CompilePlan(Settings):
    """Compilation of each layer with torch.compile."""

    enabled: bool = False
    """Compile every decoder layer."""
    backend: Literal["inductor", "aot_eager"] = "inductor"
    """Backend of torch.compile. `aot_eager` traces and generates no code; it is quick, for
    tests."""


class LossPlan(Settings):
    """How the last stage computes the loss."""

    chunk_tokens: Literal["auto"] | NotNegative = "auto"
    """Compute head and loss in chunks of this many tokens, so that all logits of a microbatch never
    exist at once. 0 computes all logits. `auto` is 0 unless these take more than 512 MiB on a
    process in the number format of the loss. Then the logits of a chunk take about 256 MiB, but it
    has 512 tokens or more, and there are 8 chunks at most. It is also 0 for a class whose head
    cannot run in chunks, and with `preference.loss` or `distillation.teacher`, whose losses need
    all logits. In a program without a pipeline `auto` is 0; with another number
    `model(labels=...)` returns no logits."""

    @property
    def size(self) -> int:
        """Return the number of tokens of a chunk of a resolved plan, 0 without chunks."""
        assert isinstance(self.chunk_tokens, int), "the plan is not resolved"
        return self.chunk_tokens


class ParallelPlan(Settings):
    """Everything about how a model is parallelized, in one TOML file."""

    model_types: list[str] = []
    """Hugging Face model types that this plan is written for. Empty: any."""
    mesh: MeshPlan = MeshPlan()
    pipeline: PipelinePlan = PipelinePlan()
    tensor: TensorPlan = TensorPlan()
    context: ContextPlan = ContextPlan()
    attention: AttentionPlan = AttentionPlan()
    shard: ShardPlan = ShardPlan()
    precision: PrecisionPlan = PrecisionPlan()
    recompute: RecomputePlan = RecomputePlan()
    compile: CompilePlan = CompilePlan()
    loss: LossPlan = LossPlan()
