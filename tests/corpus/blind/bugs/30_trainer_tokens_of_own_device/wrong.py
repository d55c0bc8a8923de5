"""Fine-tunes a tiny Llama on padded texts with the Trainer of transformers."""

import os
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

LENGTH, VOCAB, GLOBAL_BATCH = 12, 40, 8
world = int(os.environ.get("WORLD_SIZE", 1))


class Texts(Dataset):
    """Random texts of different lengths; padding has the label -100."""

    def __init__(self, size):
        draw = torch.Generator().manual_seed(34)
        self.tokens = torch.randint(1, VOCAB, (size, LENGTH), generator=draw)
        self.lengths = torch.randint(3, LENGTH + 1, (size,), generator=draw)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        mask = (torch.arange(LENGTH) < self.lengths[i]).long()
        tokens = self.tokens[i]
        return dict(input_ids=tokens * mask, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100))


set_seed(34)
config = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    tie_word_embeddings=False,
)
model = LlamaForCausalLM(config)
arguments = TrainingArguments(
    output_dir=tempfile.gettempdir(),
    per_device_train_batch_size=GLOBAL_BATCH // world,
    max_steps=3,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    average_tokens_across_devices=False,
    use_cpu=True,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=Texts(64))
trainer.train()
