"""A CPU: the selection compiled by numba, and convolutions in channels-last memory format."""
