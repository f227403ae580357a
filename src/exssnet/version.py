"""The package's version, in a module without imports so that the build and `--version` need nothing else."""

__version__ = "0.1.0"
