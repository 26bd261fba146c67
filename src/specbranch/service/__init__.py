"""The draft service and its client: real processes, real sockets, and nothing that can hold the target up."""
