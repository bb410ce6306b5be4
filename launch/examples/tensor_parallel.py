"""OSLO's tutorial of tensor parallelism, end to end: write, train, save, load on any mesh, merge.

torchrun --nproc-per-node 4 launch/examples/tensor_parallel.py gpt2 lines.txt out
"""

import os
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import meshtrain

NAME, TEXT, OUT = sys.argv[1:4]
TENSOR_PARALLEL_SIZE, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
BATCH_SIZE, SEQ_LEN, SAVE_INTERVAL, TRAIN_STEP = 4, 64, 50, 100
PROMPT = "I don't want a lot for Christmas. There is just one thing"

model = AutoModelForCausalLM.from_pretrained(NAME)
tokenizer = AutoTokenizer.from_pretrained(NAME)
tokenizer.pad_token = tokenizer.eos_token  # GPT-2's tokenizer has none
optimizer = torch.optim.Adam(model.parameters(), lr=3e-5)


def write(model):
    tokens = tokenizer(PROMPT, return_tensors="pt").to(model.device)
    return tokenizer.decode(model.generate(**tokens, num_beams=3, max_new_tokens=20)[0])


def say(*words):
    if RANK == 0:
        print(*words, flush=True)


before = write(model)
model = meshtrain.parallelize(model, {"mesh": {"tp": TENSOR_PARALLEL_SIZE}})
meshtrain.rebind(optimizer)
say(write(model), "\nThe same text as before:", write(model) == before)

torch.manual_seed(0)  # all ranks shuffle alike
loader = DataLoader(Path(TEXT).read_text().splitlines(), batch_size=BATCH_SIZE, shuffle=True)
model.train()
for step, lines in zip(range(1, TRAIN_STEP + 1), loader, strict=False):
    batch = tokenizer(lines, return_tensors="pt", padding=True, truncation=True, max_length=SEQ_LEN).to(model.device)
    optimizer.zero_grad()
    loss = model(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    optimizer.step()
    if step % SAVE_INTERVAL == 0:
        saved = f"{OUT}/step-{step}"
        model.save_parallelized(saved, tokenizer=tokenizer)  # a file for each rank
        say(f"step {step} loss {loss.item():.6f}")

# Any program on any number of processes may do this. Each rank reads only its shards.
again = meshtrain.parallelize(meshtrain.build_model(saved), {"mesh": {"tp": TENSOR_PARALLEL_SIZE}}).eval()
meshtrain.load_weights(again, saved)
say("Loaded again, it writes the same:", write(again) == write(model))
say(f"One model of all ranks: meshtrain merge {saved} {OUT}/merged")
