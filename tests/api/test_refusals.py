"""Calls that a parallel model refuses, and the advice in the messages."""

import copy
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

import meshtrain
from meshtrain.api.handle import handle_of
from meshtrain.errors import DataError, MeshtrainError, ModelError, PlanError
from meshtrain.models.build import load_hf_config
from tests.api.programs import Batch, own_part, padded_batches, parallel, stock_model
from tests.parity import MODELS, VOCABULARY
from tests.ranks import run_on_ranks


def message_of(kind: type[MeshtrainError], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


def misuse_tensor_parallel() -> dict[str, str]:
    model = parallel(stock_model("gpt2-tied"), {"tp": 2})
    rank = torch.distributed.get_rank()
    batch = padded_batches()[0]
    # The model already has this device and format, so nothing is refused.
    assert model.to("cpu").double().cpu() is model
    assert model.to(dtype=torch.float64) is model
    model.load_state_dict(model.state_dict())
    shuffled = {name: value.roll(rank, 0) for name, value in batch.items()}
    return {
        "twice": message_of(ModelError, lambda: parallel(model, {"tp": 2})),
        "copied": message_of(ModelError, lambda: copy.deepcopy(model)),
        "resized": message_of(ModelError, lambda: model.resize_token_embeddings(120)),
        "moved": message_of(ModelError, lambda: model.to("meta")),
        "cast": message_of(ModelError, lambda: model.bfloat16()),
        "cast by to": message_of(ModelError, lambda: model.to(torch.float32)),
        "shuffled": message_of(DataError, lambda: model(**shuffled)).replace(f"rank {rank}", "rank R"),
        "drawn": message_of(ModelError, lambda: parallel(stock_model("gpt2-tied", seed=rank), {"tp": 2})),
        "not ours": message_of(ModelError, lambda: meshtrain.clip_grad_norm(stock_model("gpt2-tied"), 1.0)),
        "no transformer": message_of(ModelError, lambda: parallel(nn.Linear(2, 2), {"tp": 2})),
        "half": message_of(ModelError, lambda: parallel(stock_model("gpt2-tied").half(), {"tp": 2})),
        "mixed": message_of(ModelError, lambda: parallel(mixed(), {"tp": 2})),
        "half on meta": message_of(ModelError, lambda: parallel(half_on_meta(), {"tp": 2})),
        "other mesh": message_of(
            PlanError,
            lambda: meshtrain.parallelize(
                stock_model("gpt2-tied"), {"mesh": {"tp": 1}}, meshtrain.build_mesh({"mesh": {"tp": 2}})
            ),
        ),
        "foreign mesh": message_of(
            PlanError,
            lambda: meshtrain.parallelize(
                stock_model("gpt2-tied"),
                {"mesh": {"tp": 2}},
                torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)),
            ),
        ),
        "too many": message_of(PlanError, lambda: parallel(stock_model("gpt2-tied"), {"tp": 4})),
        "whole": message_of(ModelError, lambda: model.load_state_dict(stock_model("gpt2-tied").state_dict())),
    }


def mixed() -> nn.Module:
    model = stock_model("gpt2-tied")
    model.transformer.ln_f.half()
    return model


def half_on_meta() -> nn.Module:
    model = stock_model("gpt2-tied")
    model.transformer.ln_f.to("meta")
    return model


WANTED = {
    "twice": r"this model is parallel already; call meshtrain.parallelize once. For another plan save it .* it again",
    "copied": r"a parallel model cannot be copied: .*; parallelize a stock model for each copy",
    "resized": r"the embeddings of a parallel model cannot be resized; call model.resize_token_embeddings\(...\)",
    "moved": r"a parallel model cannot be moved \(to meta, torch.float64\): every rank keeps .*; leave the call out",
    "cast": r"a parallel model cannot be moved \(to cpu, torch.bfloat16\)",
    "cast by to": r"a parallel model cannot be moved \(to cpu, torch.float32\)",
    "shuffled": r"rank R received a different batch from a rank that shares its model over tp, cp or pp \(here: "
    r"attention_mask \(8, 8\), input_ids \(8, 8\), labels \(8, 8\)\); pass the same rows in the same order",
    "drawn": r"ranks 0 and 1 pass models that differ in 52 of 52 values: transformer.wte.weight is float64 \(98, 32\) "
    r"trained, hash \w{16} and float64 \(98, 32\) trained, hash \w{16}; load the same weights on every rank, freeze",
    "not ours": r"a GPT2LMHeadModel is not a parallel model; pass what meshtrain.parallelize\(model, plan\) returns",
    "no transformer": r"a Linear is not a model of transformers; pass one, such as GPT2LMHeadModel",
    "half": r"the parameters are float16; train in float32 \(model.float\(\)\) or bfloat16, or set the formats",
    "mixed": r"the parameters are float16, float64; train in float32",
    "half on meta": r"2 of 52 parameters are on the meta device \(transformer.ln_f.weight\), the others have values",
    "other mesh": r"mesh.tp = 1 in the plan, but the mesh that was passed has 2",
    "foreign mesh": r"the mesh has the axes \('tp',\), but a plan needs .*; build it with meshtrain.build_mesh",
    "whole": r"load_state_dict: transformer.wte.weight is a full tensor, and every rank of this model keeps a shard "
    r"of it; load it into the stock model before meshtrain.parallelize, or call meshtrain.load_weights\(model",
    "too many": r"mesh: pp 1 x dp_replicate 1 x ep 1 x cp 1 x tp 4 uses processes in groups of 4, but 2 is not a ",
}


def test_tensor_parallel_model_refuses_calls_that_would_break_it() -> None:
    for found in run_on_ranks(2, misuse_tensor_parallel):
        assert found.keys() == WANTED.keys()
        for what, message in found.items():
            assert re.search(WANTED[what], message), (what, message)


def adapted(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))


def refuse_and_retry() -> None:
    """Check that a refused model, also if another rank caused it, is unchanged and usable."""
    rank = torch.distributed.get_rank()
    for make in (stock_model, lambda name, **more: adapted(stock_model(name, **more))):
        for plan, others, kind in (
            ({"mesh": {"tp": 4}}, 0, PlanError),
            ({"mesh": {"tp": 2}, "tensor": {"styles": {"no.such.*": "colwise"}}}, 0, PlanError),
            ({"mesh": {"tp": 2}}, rank, ModelError),
        ):
            model = make("gpt2-tied", seed=others)
            before, values = dict(model.named_parameters()), {k: v.clone() for k, v in model.state_dict().items()}
            buffers = dict(model.named_buffers())
            message_of(kind, partial(meshtrain.parallelize, model, plan))
            after = dict(model.named_parameters())
            assert after.keys() == before.keys()
            assert all(after[name] is before[name] for name in before)
            assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
            assert model.state_dict().keys() == values.keys()
            assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    again = stock_model("gpt2-tied")
    batch = padded_batches()[0]
    wanted = again(**batch).loss
    message_of(PlanError, lambda: parallel(again, {"tp": 4}))
    torch.testing.assert_close(parallel(again, {"tp": 2})(**batch).loss, wanted, rtol=1e-12, atol=0)


def test_refused_parallelize_leaves_the_model_unchanged() -> None:
    run_on_ranks(2, refuse_and_retry)


def misuse_pipeline() -> dict[str, str]:
    plan = {"mesh": {"pp": 2}, "pipeline": {"schedule": "Interleaved1F1B", "stages_per_rank": 2}}
    model = meshtrain.parallelize(stock_model("llama-tied"), plan, micro_batch_size=2)
    batch = padded_batches()[0]
    odd = {name: value.repeat(2, 1)[:10] for name, value in batch.items()}
    given = {
        "no labels": {"input_ids": batch["input_ids"]},
        "few": odd,
        "short": batch | {"labels": batch["labels"][:, :3]},
        "unknown": batch | {"labels": batch["labels"] + 98},
        "other rows": batch | {"position_ids": torch.arange(8)[None]},
        "other width": batch | {"attention_mask": batch["attention_mask"][:, :5]},
        "other width of a whole mask": batch | {"attention_mask": torch.ones(8, 1, 8, 5, dtype=torch.bool)},
        "rows": {name: value[:3] for name, value in batch.items()},
        "no rows": {name: value[:0] for name, value in batch.items()},
        "one row": {name: value[0] for name, value in batch.items()},
        "floats": batch | {"input_ids": batch["input_ids"].double()},
        "lists": {name: value.tolist() for name, value in batch.items()},
        "flag": batch | {"use_cache": True},
        "embeddings": batch | {"inputs_embeds": torch.zeros(8, 8, 32)},
        "shifted": batch | {"shift_labels": batch["labels"]},
        "list": [batch["input_ids"], batch["labels"]],
        "tensor": batch["input_ids"],
        "None": None,
    }
    found = {what: message_of(DataError, partial(model.forward_backward, value)) for what, value in given.items()}
    assert found == {what: message_of(DataError, partial(model.evaluate, value)) for what, value in given.items()}
    with torch.no_grad():
        found["no gradients"] = message_of(ModelError, lambda: model.forward_backward(batch))
    found["called"] = message_of(ModelError, lambda: model(**batch))
    found["copied"] = message_of(ModelError, lambda: copy.deepcopy(model))
    found["pickled"] = message_of(ModelError, lambda: pickle.dumps(model))
    for name in ("forward", "to", "state_dict", "num_parameters"):
        assert not hasattr(model, name)
        found[name] = message_of(ModelError, partial(getattr, model, name))
    assert not hasattr(model, "__array__")
    # Values that change nothing may be passed.
    loss = model.evaluate(batch)
    silent = batch | {"use_cache": False, "position_ids": None, "labels": batch["labels"].int()}
    assert torch.equal(model.evaluate(silent), loss)
    torch.testing.assert_close(model.forward_backward(silent), loss, rtol=1e-12, atol=0)
    model.zero_grad(set_to_none=False)
    assert not any(parameter.grad.any() for parameter in model.parameters())
    for parameter in model.parameters():
        parameter.requires_grad = False
    found["frozen"] = message_of(ModelError, lambda: model.forward_backward(batch))
    return found


def test_pipeline_refuses_calls_that_it_cannot_run() -> None:
    trains = (
        "call loss = model.forward_backward(batch) to train on a complete batch, or model.evaluate(batch) for its loss"
    )
    tensors = (
        "and a pipeline cuts tensors into microbatches; pass a tensor with as many rows as input_ids, or leave it out"
    )
    mapping = 'pass a mapping with input_ids and labels, as a tokenizer returns it with return_tensors="pt"'
    wanted = {
        "copied": "a parallel model cannot be copied: its process groups and hooks belong to it alone; parallelize a "
        "stock model for each copy, or keep copies of the parameters that you need (parameter.detach().clone())",
        "no labels": "the batch has no labels, it has input_ids; pass input_ids and labels: the ranks of a "
        "pipeline compute the loss themselves",
        "rows": "a batch of 3 rows cannot be cut into microbatches of 2; change one of them",
        "few": "pipeline.schedule = 'Interleaved1F1B' runs microbatches in equal rounds of at least pp = 2; 5 "
        "cannot be divided in this way; use a multiple of 2",
        "short": "labels has the shape (8, 3), input_ids (8, 8); pass a label for every token, -100 for one that "
        "must not count",
        "unknown": "labels has tokens from -2 to 195, but the model knows 0 to 97; use the tokenizer of the "
        "model, or add rows for new tokens (model.resize_token_embeddings) before meshtrain.parallelize",
        "other rows": "position_ids has the shape (1, 8), input_ids (8, 8): every tensor of a batch is cut into "
        "microbatches along its first dimension; pass the same number of rows in all",
        "other width": "attention_mask has the shape (8, 5), input_ids (8, 8): its last dimension must be the 8 "
        "tokens of a row; pass as many",
        "other width of a whole mask": "attention_mask has the shape (8, 1, 8, 5), input_ids (8, 8): its last "
        "dimension must be the 8 tokens of a row; pass as many",
        "no rows": "input_ids has the shape (0, 8), so there is nothing to compute; leave out such batches",
        "one row": "input_ids is (8,) int64; pass token ids (rows, seq), int64",
        "floats": "input_ids is (8, 8) float64; pass token ids (rows, seq), int64",
        "lists": f"input_ids in the batch is a list, {tensors}",
        "flag": f"use_cache in the batch is a bool, {tensors}",
        "embeddings": "inputs_embeds is in the batch: only the first stage could use them; pass input_ids",
        "shifted": "shift_labels is in the batch: a pipeline takes only labels; pass those that the model itself takes",
        "list": f"the batch is a list; {mapping}",
        "tensor": f"the batch is a Tensor; {mapping}",
        "None": f"the batch is a NoneType; {mapping}",
        "no gradients": "forward_backward was called under torch.no_grad(); call it outside, or evaluate(batch)",
        "called": f"a model over pp cannot be called, because no rank has all of it; {trains}",
        "pickled": "a parallel model can be neither copied nor pickled, because no rank has all of it; save it with "
        "model.save_pretrained(folder), or with its optimizer by meshtrain.save_checkpoint(directory, state)",
        "forward": f"a model over pp has no forward; {trains}",
        "to": "a model over pp has no to: every rank keeps its stages on its own device; leave the call out, and "
        "choose number formats with model.to(...) before meshtrain.parallelize or in [precision] of the plan",
        "state_dict": "a model over pp has no state_dict; call meshtrain.save_checkpoint(directory, state), or "
        "model.save_pretrained(folder)",
        "num_parameters": "a model over pp has no num_parameters: a rank holds its stages only; use the stock model "
        "for this, before meshtrain.parallelize",
        "frozen": "every parameter is frozen, so there is nothing to train; set requires_grad_(True) on some",
    }
    for found in run_on_ranks(2, misuse_pipeline):
        assert found == wanted


def misuse_on_one_rank() -> list[str]:
    """Pass a wrong batch on one of four ranks (pp x dp); return the messages of all."""
    model = parallel(stock_model("gpt2-tied"), {"pp": 2, "dp_replicate": 2})
    rank = torch.distributed.get_rank()
    batch = own_part(model, padded_batches()[0])
    long = torch.ones(4, 70, dtype=torch.long)
    wrong = [
        {name: value for name, value in batch.items() if name != "labels"},
        batch | {"attention_mask": batch["attention_mask"] * 0},
        batch | {"input_ids": None},
    ]
    text = [
        message_of(DataError, partial(model.forward_backward, other if rank == place else batch))
        for place, other in enumerate(wrong, start=1)
    ]
    for rows in ({"input_ids": long, "labels": long}, batch | {"position_ids": torch.arange(60, 68).expand(4, 8)}):
        text.append(message_of(DataError, partial(model.evaluate, rows)))
    model.forward_backward(batch)
    return text


def test_wrong_batch_on_one_rank_is_an_error_on_all() -> None:
    takes = "pass input_ids and labels: the ranks of a pipeline compute the loss themselves"
    shorter = "pass shorter rows (truncation=True, max_length=... of the tokenizer)"
    for text in run_on_ranks(4, misuse_on_one_rank):
        assert text == [
            f"rank 1: the batch has no labels, it has input_ids, attention_mask; {takes}",
            "rank 0 received a different batch from a rank that shares its model over tp, cp or pp (here: "
            "attention_mask (4, 8), input_ids (4, 8), labels (4, 8)); pass the same rows in the same order to all of "
            "these ranks: call torch.manual_seed(0) before the DataLoader shuffles, or use a sampler over the data "
            "ranks only",
            f"rank 3: the batch has no input_ids, it has attention_mask, labels; {takes}",
            f"rank 0: rows of 70 tokens, but the model has learned positions 0 to 63; {shorter}",
            f"rank 0: position_ids from 60 to 67, but the model has learned positions 0 to 63; {shorter}",
        ]


def parallelize_differently() -> list[str]:
    rank = torch.distributed.get_rank()
    plan = {"mesh": {"pp": 2}}
    others: list[tuple[dict[str, Any], Any]] = [
        (plan, 1 + rank),
        ({"mesh": {"pp": 2 - rank, "tp": 1 + rank}}, 1),
        (plan | {"tensor": {"styles": {f"transformer.h.*.{n}": "replicate" for n in [*"abcdefgh", str(rank)]}}}, 1),
    ]
    model = stock_model("gpt2-tied")
    return [
        message_of(PlanError, partial(meshtrain.parallelize, model, given, micro_batch_size=rows))
        for given, rows in others
    ]


def test_different_arguments_on_ranks_are_refused() -> None:
    same = "all ranks make this call together; pass the same on all of them"
    for text in run_on_ranks(2, parallelize_differently):
        assert text[0] == f"parallelize: micro_batch_size is 1 on rank 0 and 2 on rank 1; {same}"
        assert text[1] == f"parallelize: mesh.pp is 2 on rank 0 and 1 on rank 1; {same}"
        assert text[2].startswith("parallelize: tensor.styles is ...")
        assert "transformer.h.*.0': 'replicate'} on rank 0 and ..." in text[2]
        assert text[2].endswith(f"transformer.h.*.1': 'replicate'}} on rank 1; {same}")
        # The message shows a long table from shortly before its first difference.
        assert len(text[2]) < 300


def fail_halfway() -> list[str]:
    """Let the first stage fail in its second microbatch; return the messages of later calls."""
    model = parallel(stock_model("gpt2-tied"), {"pp": 2})
    first, second, *_ = padded_batches()
    model.forward_backward(first)
    tied = next(parameter for name, parameter in model.named_parameters() if "wte" in name or "lm_head" in name)
    gradient = tied.grad.clone()
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    if not model.has_last_stage:
        model._pipeline.stages[0].model.register_forward_pre_hook(FailsTheSecondTime())
    # The other rank waits for this one until this one has ended.
    with pytest.raises(RuntimeError):
        model.forward_backward(second)
    assert torch.equal(torch.rand(3), wanted)
    assert torch.equal(tied.grad, gradient)
    return [message_of(ModelError, partial(use, second)) for use in (model.forward_backward, model.evaluate)]


class FailsTheSecondTime:
    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, *_: Any) -> None:
        self._calls += 1
        if self._calls > 1:
            raise ValueError("broken")


def test_failed_pipeline_refuses_further_calls_and_leaves_the_program_unchanged() -> None:
    for text in run_on_ranks(2, fail_halfway, joins=False):
        assert text == 2 * [
            "an earlier forward_backward has ended halfway with an exception (RuntimeError): the stages on other ranks "
            "wait for messages that never come, so this model cannot be used any more; end the program on all ranks, "
            "and start again from a checkpoint"
        ]


def call(model: Any, batch: Batch) -> Any:
    return model(**batch)


def use_too_early() -> list[str]:
    config = load_hf_config(MODELS["gpt2-tied"])
    messages = []
    for mesh, batch in (({"tp": 2}, padded_batches()[0]), ({"pp": 2}, padded_batches()[0])):
        model = parallel(meshtrain.build_model(config, dtype=torch.float64), mesh)
        use = model.forward_backward if "pp" in mesh else partial(call, model)
        messages.append(message_of(ModelError, partial(use, batch)))
        meshtrain.initialize(model, seed=3)
        use(batch)
    return messages


NO_VALUES = (
    "the parameters of this model have no values yet, because it was built on meta; call "
    "meshtrain.initialize(model, seed=0), meshtrain.load_weights(model, folder) or "
    "meshtrain.load_checkpoint(directory, state) first"
)


def test_model_from_meta_needs_values_before_its_first_pass() -> None:
    for found in run_on_ranks(2, use_too_early):
        assert found == [NO_VALUES] * 2


def test_parallel_model_has_a_handle() -> None:
    assert run_on_ranks(1, _handle) == [("GPT2LMHeadModel", True)]


def _handle() -> tuple[str, bool]:
    model = parallel(AutoModelForCausalLM.from_config(load_hf_config(MODELS["gpt2-tied"])), {})
    return type(model).__name__, handle_of(model).has_values


def refuse_different_values(folder: Path) -> list[str]:
    """Pass each rank its own seed and folder, and a folder of one rank; return the messages."""
    model = parallel(meshtrain.build_model(load_hf_config(MODELS["gpt2-tied"])), {"tp": 2})
    rank = torch.distributed.get_rank()
    if rank == 0:
        AutoModelForCausalLM.from_config(load_hf_config(MODELS["gpt2-tied"])).save_pretrained(folder / "0")
    torch.distributed.barrier()
    (folder / "1").symlink_to(folder / "0") if rank == 1 else None
    torch.distributed.barrier()
    return [
        message_of(ModelError, lambda: meshtrain.initialize(model, seed=rank)),
        message_of(ModelError, lambda: meshtrain.load_weights(model, folder / str(rank))),
        message_of(ModelError, lambda: meshtrain.load_weights(model, folder / ("0", "missing")[rank])),
        message_of(ModelError, lambda: meshtrain.load_weights(model, folder / "0", enlarge_vocabulary=rank == 1)),
        message_of(ModelError, lambda: meshtrain.load_weights(model, folder / "0" / "config.json")),
    ]


def test_different_seeds_or_folders_on_ranks_are_refused(tmp_path: Path) -> None:
    same = "all ranks make this call together; pass the same on all of them"
    for text in run_on_ranks(2, refuse_different_values, tmp_path):
        assert text == [
            f"initialize: seed is 0 on rank 0 and 1 on rank 1; {same}",
            f"load_weights: folder is {tmp_path}/0 on rank 0 and {tmp_path}/1 on rank 1; {same}",
            f"folder = '{tmp_path}/missing': there is no such directory, and a hub id looks like 'owner/name'",
            f"load_weights: enlarge_vocabulary is False on rank 0 and True on rank 1; {same}",
            f"folder = '{tmp_path}/0/config.json' is a file; use its directory, '{tmp_path}/0'",
        ]


def give_unknown_tokens(mesh: dict[str, int]) -> list[str]:
    """Train, evaluate and predict on a token id beyond the vocabulary; return the messages."""
    model = meshtrain.parallelize(stock_model("llama-tied"), {"mesh": mesh})
    ids = torch.tensor([[3, VOCABULARY]] * 2)
    batch = {"input_ids": ids, "labels": torch.full_like(ids, -100)}
    calls = [model.forward_backward, model.evaluate] if "pp" in mesh else [lambda batch: model(**batch)]
    text = []
    for call in calls:
        with torch.no_grad(), pytest.raises(DataError) as refused:
            call(batch)
        text.append(str(refused.value))
    return text


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}])
def test_token_ids_beyond_the_vocabulary_are_refused(mesh: dict[str, int]) -> None:
    for answers in run_on_ranks(2, give_unknown_tokens, mesh, joins=False):
        for text in answers:
            assert text.startswith(f"input_ids has tokens from 3 to {VOCABULARY}, but the model knows 0 to ")
