"""The pure algorithm: standard library and NumPy only. Randomness comes in as a `Chance`, time as a number."""
