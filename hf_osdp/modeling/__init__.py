"""Name the parts of a model and change them: units, batches, offloaded activations, split operators."""
