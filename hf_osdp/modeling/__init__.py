"""Find and change the parts of a model: units, batches, offloaded activations, split operators."""
