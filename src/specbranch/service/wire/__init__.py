"""The wire between draft services and their clients."""
