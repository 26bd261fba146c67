"""The commands of `specbranch`, one chapter each."""
