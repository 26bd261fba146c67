"""vLLM's own command line, started by `specbranch serve` as `python -m specbranch.plugins.vllm.launch serve ...`."""

from __future__ import annotations

from specbranch.plugins.vllm.compat.launch import run_command_line

if __name__ == "__main__":  # vLLM's processes import this module again
    run_command_line()
