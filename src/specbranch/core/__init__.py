"""The pure algorithm: standard library and NumPy only. Randomness comes in as a `RandomSource`, time as a number."""
