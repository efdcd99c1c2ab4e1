"""A model of torch's caching allocator for CUDA: what a step reserves of the device."""
