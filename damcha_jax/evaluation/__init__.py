"""Evaluation: exact likelihoods over whole splits, and metrics of generated images and texts."""
