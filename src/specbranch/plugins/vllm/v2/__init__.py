"""The speculator for vLLM's Model Runner V2: the same proposer, behind another hook."""
