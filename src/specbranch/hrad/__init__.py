"""H-RAD, a network that predicts from the target's hidden states how much of a draft is accepted, and its training."""
