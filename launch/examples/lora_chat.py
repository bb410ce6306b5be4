"""Fine-tune on chats with LoRA: frozen base, adapters of peft, on any mesh without a pipeline.

torchrun --nproc-per-node 4 launch/examples/lora_chat.py model-folder chats.jsonl out
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

import meshtrain

FOLDER, CHATS, OUT = sys.argv[1:4]
STEPS, ROWS, RANK = 20, 4, int(os.environ["RANK"])

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
torch.manual_seed(0)  # all ranks draw the same adapters
base = AutoModelForCausalLM.from_pretrained(FOLDER)
lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
model = meshtrain.parallelize(get_peft_model(base, lora), {"mesh": {"tp": 2, "dp_shard": -1}})

trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-3)
meshtrain.rebind(optimizer)
parallel = model.get_base_model()
chats = [json.loads(line)["messages"] for line in Path(CHATS).read_text().splitlines()]


def tokenize(messages):
    """Return ids of a chat, and labels of what the assistant says alone."""
    ids, labels = [], []
    for count, message in enumerate(messages, start=1):
        so_far = tokenizer.apply_chat_template(messages[:count], tokenize=True, return_dict=False)
        said = so_far[len(ids) :]
        labels += said if message["role"] == "assistant" else [-100] * len(said)
        ids = so_far
    return ids, labels


def rows_of(step):
    """Return this data rank's rows of a global batch, padded to the longest."""
    order = torch.randperm(len(chats), generator=torch.Generator().manual_seed(step))
    first = parallel.data_rank * ROWS
    rows = [tokenize(chats[index]) for index in order[first : first + ROWS]]
    pad = partial(pad_sequence, batch_first=True)
    return {
        "input_ids": pad([torch.tensor(ids) for ids, _ in rows], padding_value=tokenizer.pad_token_id),
        "attention_mask": pad([torch.ones(len(ids), dtype=torch.long) for ids, _ in rows]),
        "labels": pad([torch.tensor(labels) for _, labels in rows], padding_value=-100),
    }


model.train()
for step in range(1, STEPS + 1):
    optimizer.zero_grad()
    loss = model(**rows_of(step)).loss
    loss.backward()
    meshtrain.clip_grad_norm(model, 1.0)
    optimizer.step()
    if step % 10 == 0 and RANK == 0:
        print(f"step {step} loss {loss.item():.6f}", flush=True)
meshtrain.save_pretrained(model, f"{OUT}/adapters", tokenizer=tokenizer)  # for PeftModel.from_pretrained
meshtrain.save_pretrained(model, f"{OUT}/merged", tokenizer=tokenizer, merge_adapters=True)  # an ordinary model
