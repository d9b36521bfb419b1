"""Training: optimizer, sharding, checkpoints and the loop."""
