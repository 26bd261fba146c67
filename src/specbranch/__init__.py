"""Branch-parallel speculative decoding: a draft prepares for the verdicts that the target is about to return."""

__version__ = "0.1.0.dev0"
