"""DAMCHA, data-adaptive Mahalanobis cross-head attention, for JAX and Flax."""
