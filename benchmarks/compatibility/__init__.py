"""Trains the same thing twice, by the stock stack and by this package, and says whether the figures are equal."""
