"""What only a GPU can prove, in ten minutes and one report. `scripts/gpu-proof` runs it; `tests/vllm` does so on a CPU.

`plan` says which stages there are, `stages` runs one in its time, `decode` is the program of those that need vLLM, and
`report` makes one file of what was found.
"""
