"""How sure the statistical tests of sampled runs are."""

FALSE_ALARM = 1e-3  # of all tests of a run together
MAX_TESTS = 20  # of a run: the smallest p-value that can be found must lie below the level of each
