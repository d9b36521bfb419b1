"""TFDS builders of the corpora; importing one registers it with `tfds.load`. No TensorFlow."""
