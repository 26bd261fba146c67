"""The decoding algorithm, without I/O, clock or threads: randomness comes in as a `RandomSource`, time as a number."""
