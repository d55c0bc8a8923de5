BATCH_SIZE = 64
STEPS = 120

clip_grad_norm = 1.0
