"""Training and fine-tuning: the step, the optimiser, adapters, data, checkpoints and the loop around them."""
