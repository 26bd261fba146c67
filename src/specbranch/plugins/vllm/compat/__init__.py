"""Everything that depends on vLLM's version. Nothing else in the package looks into vLLM.

Import the module that you need: `config`, `engine`, `features`, `launch`, `patches` or `runner`. None imports vLLM by
itself; their functions do.
"""
