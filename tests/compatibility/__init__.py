"""Train the same thing with the stock stack and with this package, and compare the figures."""
