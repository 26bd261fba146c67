"""Draft engines behind one protocol."""
