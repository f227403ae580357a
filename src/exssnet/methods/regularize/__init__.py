"""Penalties that hold back what earlier tasks need."""
