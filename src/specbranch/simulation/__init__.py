"""The simulator: real planners, sessions and scheduling in virtual time, on recorded or synthetic traces."""
