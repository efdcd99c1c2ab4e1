"""A CUDA device whose memory is this machine's: torch's real CUDA build runs on it without a GPU (README.md)."""
