"""The target's side of a draft service."""
