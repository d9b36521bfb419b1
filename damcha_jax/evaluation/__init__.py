"""Evaluation: exact likelihoods over whole splits."""
