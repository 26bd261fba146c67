"""The client of draft services, which runs in the target's process."""
