"""Predictors: what will become of the next window of draft tokens."""
