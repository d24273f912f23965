"""Faults on purpose: `make chaos` runs them long, `make test` runs one seed of each."""
