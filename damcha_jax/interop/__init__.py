"""Weights from and to other frameworks."""
