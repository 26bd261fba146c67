"""H-RAD: predict from target features how much of a draft is accepted; its examples and its training."""
