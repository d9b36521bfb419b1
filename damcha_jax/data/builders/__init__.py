"""TFDS builders of the real data. Those of bytes register with `tfds.load`. No TensorFlow."""
