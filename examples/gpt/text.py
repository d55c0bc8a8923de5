"""Text that is part of Python, as characters: the language reference that `help("if")` prints."""

from pydoc_data.topics import topics

import torch
from torch.utils.data import Dataset


def reference():
    """All topics of the reference, concatenated, in plain ASCII."""
    text = "\n".join(topics[name] for name in sorted(topics))
    return text.encode("ascii", "ignore").decode()


class Characters(Dataset):
    """Samples from a text: `length` characters, and the same characters shifted by one as labels."""

    def __init__(self, text, alphabet, length):
        number = {character: at for at, character in enumerate(alphabet)}
        self.numbers = torch.tensor([number[character] for character in text])
        self.length = length

    def __len__(self):
        return (len(self.numbers) - 1) // self.length

    def __getitem__(self, at):
        start = at * self.length
        return self.numbers[start : start + self.length], self.numbers[start + 1 : start + self.length + 1]
