"""Analyses of models: what they may depend on, and how adaptive their metrics are."""
