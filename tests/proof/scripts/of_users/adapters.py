"""A model with adapters of peft and their dropout, in two pipeline stages."""

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import colonnade

config = dict(parallel=dict(pipeline=2), schedule=dict(type="GPipe", num_microbatches=2))
gpc = colonnade.launch(config, verbose=False)
torch.manual_seed(0)
llama = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4)
lora = peft.LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.5)
model = colonnade.parallelize(peft.get_peft_model(LlamaForCausalLM(llama), lora))
engine, *_ = colonnade.initialize(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
for step in range(2):
    tokens = torch.randint(0, 32, (4, 6), generator=torch.Generator().manual_seed(step))
    engine.zero_grad()
    engine.execute_schedule(iter([dict(input_ids=tokens, labels=tokens)]))
    engine.step()
