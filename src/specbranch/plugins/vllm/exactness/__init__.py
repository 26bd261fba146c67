"""The exactness kit: does vLLM with our proposer emit what bare vLLM emits, on a pair of models of the user's own?"""
