"""Check that speculative decoding does not change the output: compare our plugin with bare vLLM, or any two servers."""
