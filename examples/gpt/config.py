"""A small GPT on two pipeline stages; the number of ranks determines the number of data-parallel replicas."""

parallel = dict(pipeline=2)
schedule = dict(type="OneFOneB", num_microbatches=4)
clip_grad_norm = dict(max_norm=1.0, report="layer")  # one limit for all; the norm of each layer is in the log
seed = 7

WIDTH, HEADS, LAYERS, LENGTH = 128, 4, 4, 96
BATCH_SIZE = 16
STEPS = 200
LEARNING_RATE, WARM_UP = 3e-3, 15
SAVE_EVERY = 50
