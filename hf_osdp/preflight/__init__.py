"""What can go wrong in a training is said before it starts, with the remedy."""
