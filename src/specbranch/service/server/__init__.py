"""The draft service itself."""
