"""The draft service, its client in the target's process, and the protocol between them."""
