"""Tensor parallelism on two ranks; the number of ranks determines the number of data-parallel replicas."""

parallel = dict(tensor=dict(size=2, mode="1d"))
clip_grad_norm = 1.0
seed = 7

LENGTH, BATCH_SIZE = 64, 8
STEPS, SAVE_EVERY = 60, 20
LEARNING_RATE, WARM_UP = 3e-3, 5
