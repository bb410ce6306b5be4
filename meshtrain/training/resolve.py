"""Resolve a run: its model configuration, its model and its plan, which are checked together.

`check`, `plan`, `verify` and `train` all call `resolve_run` once, and pass its result on.
"""

import inspect
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from meshtrain.checkpoint.huggingface.whole import whole_layout
from meshtrain.checkpoint.manifest import Manifest, read_manifest
from meshtrain.checkpoint.storage.directory import MANIFEST_NAME
from meshtrain.config.families import with_family
from meshtrain.config.plan import ParallelPlan
from meshtrain.config.run import RunConfig
from meshtrain.data.cache import Cache
from meshtrain.data.tokens.tokenizer import open_tokenizer
from meshtrain.errors import ConfigError, DataError, ModelError
from meshtrain.models.adapters import adapter_parameters
from meshtrain.models.build import build_meta_model, load_hf_config
from meshtrain.models.dtypes import DTYPES
from meshtrain.models.lora import make_adapters
from meshtrain.models.rotary import constant_length
from meshtrain.models.whole.folder import described_half, files_identity, is_local, whole_folder
from meshtrain.models.whole.half import LanguageHalf
from meshtrain.parallel.account import StageShare, account
from meshtrain.parallel.check import BatchShape, resolve_plan
from meshtrain.parallel.check.routers import check_expert_tokens, check_fillers
from meshtrain.parallel.moment_blocks import check_moment_blocks
from meshtrain.parallel.packing import check_packing
from meshtrain.parallel.shard import needs_fsdp
from meshtrain.parallel.tensor.adapters import check_adapters_of
from meshtrain.runtime.environment import rank_from_environment, world_size_from_environment
from meshtrain.training.distillation.teacher import Teacher, resolve_teacher
from meshtrain.training.noise_scale import check_noise_scale
from meshtrain.training.optim import build_learning_rate
from meshtrain.training.parameter_groups import freeze, group_problems

# Stands in for a number of steps that is known only after the text is read.
ANY_NUMBER = 1_000_000


@dataclass(frozen=True)
class ResolvedRun:
    """A run whose settings fit each other, the model and the number of processes.

    Attributes:
        config: the run as it was read; its plan still has -1, `auto`, `balanced` and `even`.
        hf_config: the Hugging Face configuration of the model.
        model: the stock model on the meta device. It is frozen if there are adapters.
        adapters: LoRA layers that were taken off the model, by the FQN of their base.
        plan: the plan with the rules of the family, and without open settings.
        batch: shape of the batches.
        half: where the model is in a multimodal one, if it is the language half of one.
        teacher: that the model learns from; None without one.
    """

    config: RunConfig
    hf_config: PretrainedConfig
    model: PreTrainedModel
    plan: ParallelPlan
    batch: BatchShape
    half: LanguageHalf | None = None
    adapters: Mapping[str, nn.Module] = field(default_factory=dict)
    teacher: Teacher | None = None

    def shares(self) -> list[StageShare]:
        """Return the stages, layers, parameters and bytes of every process."""
        packs = self.config.lora.base == "nf4"
        return account(self.model, self.plan, self.config.kept_bytes, self.adapters, packs_base=packs)

    def exported_config(self, end_id: int) -> PretrainedConfig:
        """Return the Hugging Face configuration that an exported model has.

        Args:
            end_id: token that ends a document, for a new model if `model.config` does not set it.
        """
        exported = deepcopy(self.hf_config)
        if self.config.model.type is not None:
            for name in {"bos_token_id", "eos_token_id"} - self.config.model.config.keys():
                setattr(exported, name, end_id)
        return exported


def resolve_run(config: RunConfig, world_size: int | None = None) -> ResolvedRun:
    """Resolve and check a run: build its model on the meta device, and fit its plan to the model.

    Args:
        world_size: number of processes; None: that of torchrun, or else the number that the degrees
            of the plan need.

    Raises:
        UserError: with every contradiction.
    """
    # The schedule is checked before anything is prepared. Whether it accepts its arguments does not
    # depend on the number of steps.
    build_learning_rate(config.learning_rate, config.optimizer.learning_rate, config.steps or ANY_NUMBER)
    hf_config = _load_config(config)
    if config.data.tokenizer.vocab_size is not None:
        check_vocabulary(config.data.tokenizer.vocab_size, hf_config)
    plan = with_family(config.plan, hf_config.model_type)
    model = build_meta_model(
        hf_config,
        dtype=DTYPES[plan.precision.parameters],
        attention=config.model.attention,
        trust_remote_code=config.model.trust_remote_code,
    )
    _check_documents(config, model)
    data = config.data
    rows = config.preference.rows
    batch = BatchShape(
        rows * config.global_batch_size,
        rows * config.micro_batch_size,
        data.sequence_length,
        data.pad_to_multiple_of,
        tuple(config.batch_ramp.sizes(config.global_batch_size)),
        separates=data.documents == "separate",
        rows=rows,
        takes_chunks=config.preference.loss is None and config.distillation.teacher is None,
    )
    half = _find_half(hf_config)
    adapters = _adapters(config, model, half)
    ties = model.all_tied_weights_keys
    stock = [ties.get(name, name) for name, _ in model.named_parameters()]
    if adapters:
        trained = [ties.get(name, name) for name, parameter in model.named_parameters() if parameter.requires_grad]
        stock = [*adapter_parameters(adapters), *trained]
    if problems := group_problems(config.optimizer, stock, ties):
        raise ConfigError(problems)
    freeze(model, config.optimizer)
    number = world_size or _natural_world_size(config.plan)
    plan = resolve_plan(plan, model, batch, number, router=config.router)
    _check_settings(config, model, adapters, plan, batch)
    teacher = resolve_teacher(config, model, plan, batch)
    return ResolvedRun(config, hf_config, model, plan, batch, half, adapters, teacher)


def _check_settings(
    config: RunConfig, model: PreTrainedModel, adapters: Mapping[str, nn.Module], plan: ParallelPlan, batch: BatchShape
) -> None:
    """Check the settings of a run that depend on its resolved plan.

    Raises:
        UserError: for the first that does not fit.
    """
    check_adapters_of(model, adapters, plan)
    check_packing(model, config.lora, plan)
    check_moment_blocks(model, adapters, config.optimizer, plan)
    if config.lora.modules_to_save:
        _check_formats(plan)
    if config.logging.noise_scale_every is not None:
        check_noise_scale(plan, batch)
    if not config.data.drop_last:
        check_fillers(model, config.router)
    if config.logging.expert_tokens:
        check_expert_tokens(plan, model, config.router)


def _adapters(config: RunConfig, model: PreTrainedModel, half: LanguageHalf | None) -> Mapping[str, nn.Module]:
    """Return the adapters of a run, and freeze its model if there are any.

    Raises:
        UserError: for adapters that the model, or what it starts from, cannot have.
    """
    manifest = _checkpoint_of(config)
    if manifest is not None and manifest.base is not None:
        raise ModelError(
            f"model.path = {config.model.path} holds adapters alone",
            "export it with --merge-adapters, and set model.path to the exported directory",
        )
    if config.lora.rank is None:
        return {}
    if half is not None:
        raise ModelError(
            "lora.rank: the model is the language half of a multimodal one, in which its adapters have other names",
            "train the full model: leave out `lora`",
        )
    if manifest is not None:
        raise ConfigError(
            f"lora.rank: model.path = {config.model.path} is a checkpoint, which no other program can put adapters on",
            "export it, and set model.path to the exported directory",
        )
    return make_adapters(model, config.lora)


def _check_formats(plan: ParallelPlan) -> None:
    """Check that modules in float32 can compute beside a frozen model: FSDP2 casts them.

    Raises:
        ConfigError: if they cannot.
    """
    precision = plan.precision
    if precision.parameters == "bfloat16" and not needs_fsdp(plan):
        raise ConfigError(
            "lora.modules_to_save trains in float32 beside a model in bfloat16, and plan.precision.reduce = "
            f"{precision.reduce!r} without dp_shard leaves no step that casts",
            "set plan.precision.reduce = 'float32'",
        )


def _checkpoint_of(config: RunConfig) -> Manifest | None:
    """Return the manifest of the checkpoint that a run starts from; None for another start."""
    path = config.model.path
    is_checkpoint = path is not None and config.model.weights == "pretrained" and (Path(path) / MANIFEST_NAME).is_file()
    return read_manifest(Path(str(path))) if is_checkpoint else None


def _find_half(hf_config: PretrainedConfig) -> LanguageHalf | None:
    """Return where a model is in a multimodal one, and check that it can be written back.

    Raises:
        UserError: if the folder of the whole model is gone, has changed, or cannot be written back.
    """
    half = described_half(hf_config)
    if half is not None and is_local(hf_config):
        folder = whole_folder(hf_config)
        # A folder without weights may be checked, and its language half trained from random ones.
        if files_identity(folder):
            whole_layout(half, folder)
    return half


def _load_config(config: RunConfig) -> PretrainedConfig:
    """Return the Hugging Face configuration of a run's model.

    If the run asks for it, the vocabulary is enlarged to hold every token.

    Raises:
        UserError: if there is no such model, or no such tokenizer.
    """
    hf_config = load_hf_config(config.model)
    if config.model.enlarge_vocabulary:
        cache = Cache(Path(config.data.cache_directory), leads=rank_from_environment() == 0)
        text_config = hf_config.get_text_config()
        needed = open_tokenizer(config.data.tokenizer, cache).vocab_size
        text_config.vocab_size = max(text_config.vocab_size, needed)
    return hf_config


def check_vocabulary(num_tokens: int, hf_config: PretrainedConfig) -> None:
    """Check that the model's vocabulary can hold every token.

    Args:
        num_tokens: of the tokenizer.
        hf_config: of the model.

    Raises:
        DataError: if it cannot.
    """
    vocab_size = hf_config.get_text_config().vocab_size
    if num_tokens > vocab_size:
        raise DataError(
            f"the tokenizer has {num_tokens:,} tokens, but the model's vocabulary has {vocab_size:,}",
            f"set model.config.vocab_size = {num_tokens} or more for a new model, model.enlarge_vocabulary = true for "
            "a pretrained one, or use the tokenizer that belongs to it",
        )


def _check_documents(config: RunConfig, model: PreTrainedModel) -> None:
    if config.data.documents != "separate":
        return
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ModelError(
            f"{type(model).__name__} does not accept position_ids, which keep documents apart",
            'set data.documents = "joined", or data.form = "padded"',
        )
    constant = constant_length(model)
    if constant is not None and constant < config.data.sequence_length:
        raise ModelError(
            f'data.documents = "separate", but documents of more than {constant:,} tokens change the rotary '
            f"frequencies of this {type(model).__name__} for all others in their batch (rope_type in its "
            "rope_parameters)",
            f'set data.sequence_length = {constant:,} or less, or data.documents = "joined"',
        )


def _natural_world_size(plan: ParallelPlan) -> int:
    """Return the number of processes of torchrun; without it, the number that the degrees need."""
    world_size = world_size_from_environment()
    return world_size if world_size > 1 else plan.mesh.fixed_degree
