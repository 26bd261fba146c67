"""Training of H-RAD: collect what a pair does, fit the predictor, judge it on prompts that it has not seen."""
