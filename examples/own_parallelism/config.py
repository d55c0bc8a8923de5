"""Two ranks share the attention heads; the remaining factor of the world size is data parallelism."""

HEADS = 4
parallel = dict(head_data=dict(size=2, heads=HEADS))
gradient_handler = [dict(type="HeadDataGradientHandler")]
clip_grad_norm = 1.0
seed = 3

FEATURES, WIDTH, DEPTH, PLACES = 6, 32, 2, 8
BATCH_SIZE = 16
STEPS = 60
LEARNING_RATE = 3e-3
