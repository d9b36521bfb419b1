"""Corpora as arrays of bytes, and the batches that training and evaluation read from them."""
