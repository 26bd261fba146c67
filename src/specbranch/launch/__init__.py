"""Start and watch processes: draft services, vLLM servers and engines."""
