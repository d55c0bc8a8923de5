"""A user's script under `colonnade verify`: run on its ranks and alone, with its batches handed from one to the other."""
