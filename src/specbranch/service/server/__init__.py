"""The draft service: it keeps sessions, runs draft steps and answers clients."""
