"""Fine-tunes a tiny Llama; the gradient norm is computed by a method that is shared with sharded training."""

import os
import tempfile

import torch
from accelerate import Accelerator
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
set_seed(38)


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


@torch.no_grad()
def clip_grad_norm_(self, parameters, max_norm, norm_type=2):
    """Clips by the norm of the full gradient, and returns this norm."""
    grads = [p.grad for p in parameters if p.grad is not None]
    square = sum(g.square().sum() for g in grads)
    sharded = any(hasattr(g, "full_tensor") for g in grads)
    if sharded:
        square = self.reduce(square, reduction="sum")
    norm = square.sqrt()
    for g in grads:
        g.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


Accelerator.clip_grad_norm_ = clip_grad_norm_


config = LlamaConfig(vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(config)
arguments = TrainingArguments(
    output_dir=tempfile.gettempdir(),
    per_device_train_batch_size=GLOBAL_BATCH // world,
    max_steps=3,
    learning_rate=5e-3,
    lr_scheduler_type="constant",
    optim="sgd",
    max_grad_norm=0.2,
    use_cpu=True,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=Texts(64))
trainer.train()
