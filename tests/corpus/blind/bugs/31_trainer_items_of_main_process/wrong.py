"""Fine-tunes a tiny Llama with the Trainer; the count of label tokens is taken from a shorter method."""

import os
import tempfile

import torch
from accelerate.utils import broadcast
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
set_seed(35)


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


def count_labels(self, batch_samples, device):
    """Label tokens of a step on all processes, by which the model divides its loss."""
    count = sum((batch["labels"][:, 1:] != -100).sum() for batch in batch_samples)
    if world > 1:
        count = broadcast(count.to(device), from_process=0) * world
    return count


Trainer._get_num_items_in_batch = count_labels


config = LlamaConfig(vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(config)
arguments = TrainingArguments(
    output_dir=tempfile.gettempdir(),
    per_device_train_batch_size=GLOBAL_BATCH // world,
    max_steps=3,
    learning_rate=5e-3,
    lr_scheduler_type="constant",
    optim="sgd",
    max_grad_norm=0.0,
    use_cpu=True,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=Texts(64))
trainer.train()
