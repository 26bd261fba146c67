"""Two OpenAI-compatible servers of any make: does the one with speculative decoding emit what the other one emits?"""
