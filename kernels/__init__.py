"""Triton kernels, each with its slow PyTorch reference beside it; import from the submodules."""
