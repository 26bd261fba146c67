"""Draft engines behind one protocol, and the scripted engine that stands in for a model with given distributions."""
