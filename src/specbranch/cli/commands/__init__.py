"""The commands of `specbranch`, one per module."""
