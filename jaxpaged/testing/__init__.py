"""What jaxpaged is checked with: a float64 oracle, a suite of cases, and the ways in through which each case is run."""
