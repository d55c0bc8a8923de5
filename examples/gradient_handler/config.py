BATCH_SIZE = 32
STEPS = 20

gradient_handler = [dict(type="DataParallelGradientHandler")]
