"""Draft engines behind one protocol, and the scripted engine, whose distributions are given rather than computed."""
