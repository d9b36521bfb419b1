"""Transformers built from the attentions."""
