"""Parts of kernels that scripts beside this package import."""
