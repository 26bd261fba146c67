"""H-RAD: the predictor on target features, its examples and its training."""
