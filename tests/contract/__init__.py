"""The contract: the names of vLLM that we rely on, read from its source without running it.

It takes seconds, so it can be run against every new release: `scripts/contract WHEEL`. `names` lists what is relied
on, `terms` are the kinds of it, `source` reads a wheel or a directory.
"""
