"""Fine-tunes a tiny Llama; losses are collected for the log by an all-reduce."""

import os
import tempfile

import torch
import torch.distributed as dist
import transformers.trainer
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

LENGTH, VOCAB, GLOBAL_BATCH = 10, 32, 8
world = int(os.environ.get("WORLD_SIZE", 1))
set_seed(40)


class Texts(Dataset):
    """Random texts of different lengths; padding has the label -100."""

    def __init__(self, size):
        self.tokens = torch.randint(1, VOCAB, (size, LENGTH))
        self.lengths = torch.randint(3, LENGTH + 1, (size,))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        mask = (torch.arange(LENGTH) < self.lengths[i]).long()
        labels = self.tokens[i].masked_fill(mask == 0, -100)
        return dict(input_ids=self.tokens[i] * mask, attention_mask=mask, labels=labels)


def nested_gather(tensors, parallel_mode, name=None):
    """The losses of all processes, by one all-reduce; the Trainer takes the mean for its log."""
    tensors = tensors.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(tensors)
        tensors /= world
    return tensors


transformers.trainer.nested_gather = nested_gather


config = LlamaConfig(vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(config)
arguments = TrainingArguments(
    output_dir=tempfile.gettempdir(),
    per_device_train_batch_size=GLOBAL_BATCH // world,
    max_steps=3,
    learning_rate=5e-3,
    lr_scheduler_type="constant",
    use_cpu=True,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=Texts(64))
trainer.train()
