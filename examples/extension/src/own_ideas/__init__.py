"""A planner and a predictor in a package of their own."""
