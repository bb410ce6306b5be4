"""Hugging Face folders that the programs of the tests load."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}{% endfor %}"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with an end token and no pad token, like that of GPT-2."""
    letters = {letter: index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=letters | {"<end>": len(letters)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", chat_template=TEMPLATE)


def write_llama(folder: Path) -> None:
    """Write a tiny LLaMA with its tokenizer."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    end = tokenizer.eos_token_id
    config = LlamaConfig(
        vocab_size=end + 1, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=256, bos_token_id=end, eos_token_id=end,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
