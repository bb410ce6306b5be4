"""Fine-tune on chats with LoRA: frozen base, adapters of peft, on any mesh without a pipeline.

torchrun --nproc-per-node 4 launch/examples/lora_chat.py model-folder chats.jsonl out
"""

import json
import os
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

import meshtrain

FOLDER, CHATS, OUT = sys.argv[1:4]
STEPS, ROWS, RANK = 20, 4, int(os.environ["RANK"])

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
torch.manual_seed(0)  # all ranks draw the same adapters
base = AutoModelForCausalLM.from_pretrained(FOLDER)
lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
model = meshtrain.parallelize(get_peft_model(base, lora), {"mesh": {"tp": 2, "dp_shard": -1}}).train()

optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
meshtrain.rebind(optimizer)
chats = [json.loads(line)["messages"] for line in Path(CHATS).read_text().splitlines()]


def tokenize(messages):
    """Return the ids of a chat, and labels that keep only what the assistant says."""
    ids, labels = [], []
    for count, message in enumerate(messages, start=1):
        so_far = tokenizer.apply_chat_template(messages[:count], return_dict=False)
        labels += so_far[len(ids) :] if message["role"] == "assistant" else [-100] * (len(so_far) - len(ids))
        ids = so_far
    return torch.tensor(ids), torch.tensor(labels)


def rows_of(step):
    """Return this data rank's rows of a global batch, padded to the longest."""
    order = torch.randperm(len(chats), generator=torch.Generator().manual_seed(step))[: ROWS * base.num_data_ranks]
    rows = [tokenize(chats[index]) for index in order.chunk(base.num_data_ranks)[base.data_rank]]
    ids, labels = (pad_sequence(part, batch_first=True, padding_value=-100) for part in zip(*rows, strict=True))
    mask = pad_sequence([torch.ones_like(row) for row, _ in rows], batch_first=True)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


for step in range(1, STEPS + 1):
    optimizer.zero_grad()
    loss = model(**rows_of(step)).loss
    loss.backward()
    meshtrain.clip_grad_norm(model, 1.0)
    optimizer.step()
    if RANK == 0:
        print(f"step {step} loss {loss.item():.6f}", flush=True)
meshtrain.save_pretrained(model, f"{OUT}/adapters", tokenizer=tokenizer)  # for PeftModel.from_pretrained
meshtrain.save_pretrained(model, f"{OUT}/merged", tokenizer=tokenizer, merge_adapters=True)  # an ordinary model
