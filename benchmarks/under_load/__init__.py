"""What the long runs have in common: requests, servers, a relay, their progress, and trends."""
