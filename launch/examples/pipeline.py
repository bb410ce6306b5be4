"""Fine-tune a LLaMA as pipeline stages x data parallel, in your own loop. It resumes after a kill.

torchrun --nproc-per-node 4 launch/examples/pipeline.py llama-folder lines.txt out
"""

import os
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, get_scheduler

import meshtrain

FOLDER, TEXT, OUT, RANK = *sys.argv[1:4], int(os.environ["RANK"])
STEPS, SAVE_EVERY, GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE, SEQ_LEN = 20, 10, 16, 2, 128
# 2 stages x as many data-parallel ranks as are left
PLAN = {"mesh": {"pp": 2, "dp_shard": -1}, "pipeline": {"schedule": "1F1B"}, "recompute": {"mode": "full"}}

# From meta: every rank reads only the weights of its own stages.
model = meshtrain.parallelize(meshtrain.build_model(FOLDER), PLAN, micro_batch_size=MICRO_BATCH_SIZE)
meshtrain.load_weights(model, FOLDER)
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
meshtrain.rebind(optimizer)
scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=4, num_training_steps=STEPS)
state = meshtrain.TrainState(model, optimizer)
meshtrain.load_checkpoint(f"{OUT}/checkpoints", state, missing_ok=True)
if state.step:
    scheduler.load_state_dict(state.values["scheduler"])

lines = [line for line in Path(TEXT).read_text().splitlines() if line]


def rows_of(step):
    """Return this rank's rows of a step. They depend on the step, so a restart repeats none."""
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(step))[:GLOBAL_BATCH_SIZE]
    mine = order.chunk(model.num_data_ranks)[model.data_rank]
    texts = [lines[index] for index in mine]
    batch = tokenizer(texts, return_tensors="pt", padding="max_length", truncation=True, max_length=SEQ_LEN)
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    return inputs | {"labels": batch.input_ids.masked_fill(batch.attention_mask == 0, -100)}


for step in range(state.step + 1, STEPS + 1):
    optimizer.zero_grad()
    loss = model.forward_backward(rows_of(step))  # all microbatches of the step
    norm = meshtrain.clip_grad_norm(model, 1.0)
    optimizer.step()
    scheduler.step()
    if step % SAVE_EVERY == 0:
        if RANK == 0:
            print(f"step {step} loss {loss.item():.6f} norm {norm.item():.3f}", flush=True)
        state.step, state.values["scheduler"] = step, scheduler.state_dict()
        meshtrain.save_checkpoint(f"{OUT}/checkpoints", state)
meshtrain.save_pretrained(model, f"{OUT}/model", tokenizer=tokenizer)
