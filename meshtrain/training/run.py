"""A training run from its configuration to its end: the one path."""

import hashlib
import importlib.metadata
import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist
from transformers import GenerationConfig, PretrainedConfig

from meshtrain import console
from meshtrain.checkpoint.directory import CHECKPOINTS_NAME, Manifest, list_checkpoints, read_manifest
from meshtrain.checkpoint.store import load_checkpoint, save_checkpoint
from meshtrain.config.plan import AXES
from meshtrain.config.run import RunConfig
from meshtrain.config.toml import plan_hash
from meshtrain.data.loader import Batch, build_loader
from meshtrain.data.prepare import (
    PreparedData,
    check_enough,
    prepare_data,
    train_order,
    train_samples,
    validation_order,
    validation_samples,
)
from meshtrain.errors import CheckpointError, DataError
from meshtrain.models.build import local_directory
from meshtrain.models.initialize import initialize_weights, restore_buffers
from meshtrain.models.weights import load_weights
from meshtrain.parallel import parallelize
from meshtrain.parallel.account import account
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.runtime.environment import rank_from_environment, world_size_from_environment
from meshtrain.runtime.mesh import DATA_AXES, axis_size, build_mesh, data_rank
from meshtrain.runtime.process import Process, run_process
from meshtrain.training.directory import check_directory, write_resolved
from meshtrain.training.loop import Run, run_loop
from meshtrain.training.loss import TokenLoss
from meshtrain.training.optim import ShardedAdamW, build_learning_rate
from meshtrain.training.report import Resolved, batch_equation, batch_shape, resolve_run, show_plan_table, show_shares
from meshtrain.training.state import saved_tensors, wanted_tensors
from meshtrain.training.step import Trainer

LIBRARIES = ("torch", "transformers", "meshtrain")


def train(config: RunConfig) -> None:
    """Train a run, or go on with it where its newest checkpoint is.

    Raises:
        UserError: before any process group is joined, wherever the mistake can be known there.
    """
    check_directory(config)
    data = prepare_data(config.data, leads=rank_from_environment() == 0)
    check_enough(data, config.global_batch_size)
    resolved = resolve_run(config, world_size_from_environment(), end_id=data.tokenizer.end_id)
    _check_vocabulary(data, resolved.hf_config)
    num_steps = _num_steps(config, data)
    build_learning_rate(config.learning_rate, config.optimizer.learning_rate, num_steps)
    _show_head(config, resolved, num_steps)
    with run_process() as process:
        run_loop(_build(config, data, resolved, num_steps, process))


def _build(config: RunConfig, data: PreparedData, resolved: Resolved, num_steps: int, process: Process) -> Run:
    mesh = build_mesh(resolved.plan.mesh, process.device.type)
    pipeline = parallelize(
        resolved.model,
        mesh,
        resolved.plan,
        micro_batch_size=config.micro_batch_size,
        seed=config.seed,
        device=process.device,
    )
    group = mesh.get_group("tp") if pipeline.logits_are_sharded else None
    trainer = Trainer(
        pipeline=pipeline,
        loss=TokenLoss(resolved.hf_config.get_text_config().vocab_size, group),
        optimizer=ShardedAdamW(pipeline, config.optimizer),
        learning_rate=build_learning_rate(config.learning_rate, config.optimizer.learning_rate, num_steps),
        max_gradient_norm=config.optimizer.max_gradient_norm,
    )
    identity = Identity(config, data, resolved)
    first_step = _begin(config, trainer, identity)
    if process.rank == 0:
        write_resolved(config, resolved.plan)
    dist.barrier()
    return Run(
        config=config,
        trainer=trainer,
        device=process.device,
        is_first_rank=process.rank == 0,
        first_step=first_step,
        num_steps=num_steps,
        steps_per_epoch=train_order(data, global_batch_size=config.global_batch_size, seed=config.seed).steps_per_epoch,
        train_batches=_train_batches(config, data, pipeline, process, first_step, num_steps),
        evaluation_batches=_evaluation_batches(config, data, pipeline, process),
        save=partial(_save, config, trainer, identity),
        unigram_entropy=data.unigram_entropy_nats,
    )


@dataclass(frozen=True)
class Identity:
    """What a checkpoint must agree with, and what it hands on."""

    config: RunConfig
    data: PreparedData
    resolved: Resolved

    def manifest(self, step: int, pipeline: Pipeline) -> Manifest:
        """Describe a checkpoint of this run."""
        plan = self.resolved.plan
        return Manifest(
            step=step,
            seed=self.config.seed,
            global_batch_size=self.config.global_batch_size,
            mesh={axis: getattr(plan.mesh, axis) for axis in AXES},
            plan_hash=plan_hash(plan),
            model_type=self.resolved.hf_config.model_type,
            architecture=type(self.resolved.model).__name__,
            model_identity=_model_identity(self.resolved.hf_config),
            data_identity=self.data.identity,
            dtype=plan.precision.parameters,
            fused=pipeline.fused,
            tied=dict(self.resolved.model.all_tied_weights_keys),
            versions={library: importlib.metadata.version(library) for library in LIBRARIES},
        )

    def check(self, checkpoint: Path, manifest: Manifest) -> None:
        """Refuse a checkpoint that this run cannot go on from.

        Raises:
            CheckpointError: with what differs.
        """
        here = {
            "seed": self.config.seed,
            "global_batch_size": self.config.global_batch_size,
            "model_type": self.resolved.hf_config.model_type,
            "model_identity": _model_identity(self.resolved.hf_config),
            "data_identity": self.data.identity,
        }
        problems = [
            f"{checkpoint}: {name} is {getattr(manifest, name)!r} there and {value!r} here"
            for name, value in here.items()
            if getattr(manifest, name) != value
        ]
        if problems:
            raise CheckpointError(
                [*problems, "the model or the data is not that of the checkpoint; use another run_directory"]
            )

    def write_huggingface(self, directory: Path) -> None:
        """Write configuration and tokenizer, as `export` hands them on."""
        hf_config = self.resolved.hf_config
        hf_config.architectures = [type(self.resolved.model).__name__]
        hf_config.save_pretrained(directory)
        generation = GenerationConfig(eos_token_id=self.data.tokenizer.end_id, pad_token_id=self.data.tokenizer.pad_id)
        generation.save_pretrained(directory)
        shutil.copytree(self.data.tokenizer.directory, directory, dirs_exist_ok=True)


def _begin(config: RunConfig, trainer: Trainer, identity: Identity) -> int:
    """Give the parameters their values, and return the number of steps already done."""
    checkpoints = list_checkpoints(Path(config.run_directory) / CHECKPOINTS_NAME)
    pipeline = trainer.pipeline
    if checkpoints:
        newest = checkpoints[0]
        manifest = read_manifest(newest)
        identity.check(newest, manifest)
        for stage in pipeline.stages:
            restore_buffers(stage.model)
        load_checkpoint(newest, wanted_tensors(pipeline, trainer.optimizer))
        trainer.optimizer.set_steps_done(manifest.step)
        console.line(f"Resumed from {newest}: step {manifest.step:,} done")
        return manifest.step
    if config.model.weights == "pretrained":
        _load_pretrained(config, pipeline)
    else:
        for stage in pipeline.stages:
            initialize_weights(stage.model, seed=config.seed, names=pipeline.canonical_names())
    return 0


def _load_pretrained(config: RunConfig, pipeline: Pipeline) -> None:
    assert config.model.path is not None
    for stage in pipeline.stages:
        restore_buffers(stage.model)
    model = pipeline.stages[0].model
    load_weights(
        dict(pipeline.named_parameters()),
        local_directory(config.model.path),
        fused=pipeline.fused,
        tied=dict(model.all_tied_weights_keys),
        base_prefix=model.base_model_prefix,
    )


def _save(config: RunConfig, trainer: Trainer, identity: Identity, step: int) -> Path:
    return save_checkpoint(
        Path(config.run_directory) / CHECKPOINTS_NAME,
        step,
        saved_tensors(trainer.pipeline, trainer.optimizer),
        manifest=identity.manifest(step, trainer.pipeline),
        huggingface=identity.write_huggingface,
        keep=config.checkpoint.keep,
    )


def _train_batches(
    config: RunConfig, data: PreparedData, pipeline: Pipeline, process: Process, first_step: int, num_steps: int
) -> Iterable[Batch]:
    return build_loader(
        train_samples(data),
        train_order(data, global_batch_size=config.global_batch_size, seed=config.seed),
        dp_rank=data_rank(pipeline.mesh),
        dp_size=axis_size(pipeline.mesh, *DATA_AXES),
        start_step=first_step,
        stop_step=num_steps,
        pin_memory=process.device.type == "cuda",
    )


def _evaluation_batches(
    config: RunConfig, data: PreparedData, pipeline: Pipeline, process: Process
) -> Callable[[], Iterable[Batch]] | None:
    samples, order = validation_samples(data), validation_order(data, global_batch_size=config.global_batch_size)
    if samples is None or order is None:
        return None
    num_batches = min(order.steps_per_epoch, config.evaluation.max_batches or order.steps_per_epoch)
    return partial(
        build_loader,
        samples,
        order,
        dp_rank=data_rank(pipeline.mesh),
        dp_size=axis_size(pipeline.mesh, *DATA_AXES),
        start_step=0,
        stop_step=num_batches,
        pin_memory=process.device.type == "cuda",
    )


def _num_steps(config: RunConfig, data: PreparedData) -> int:
    if config.steps is not None:
        return config.steps
    assert config.epochs is not None
    order = train_order(data, global_batch_size=config.global_batch_size, seed=config.seed)
    return config.epochs * order.steps_per_epoch


def _check_vocabulary(data: PreparedData, hf_config: PretrainedConfig) -> None:
    room, needed = hf_config.get_text_config().vocab_size, data.tokenizer.vocab_size
    if needed > room:
        raise DataError(
            f"the tokenizer has {needed:,} tokens, the model's vocabulary has room for {room:,}; set "
            f"model.config.vocab_size = {needed} or more for a new model, or use the tokenizer that belongs to it"
        )


def _show_head(config: RunConfig, resolved: Resolved, num_steps: int) -> None:
    show_plan_table(resolved.plan)
    show_shares(account(resolved.model, resolved.plan))
    console.line(batch_equation(resolved.plan, batch_shape(config)))
    console.line(f"{num_steps:,} steps into {config.run_directory}")


def _model_identity(config: PretrainedConfig) -> str:
    volatile = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures", "use_cache")
    facts = {name: value for name, value in config.to_dict().items() if name not in volatile}
    return hashlib.blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
