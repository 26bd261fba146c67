"""Check that speculative decoding leaves the output as it is: for vLLM with the plugin, and for any two servers."""
