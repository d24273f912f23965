"""Measurements: `python -m bench NAME [--json]`.

Each module measures its figure against a baseline alternated in the same run, since a machine's
speed today says little about its speed tomorrow, and starts and stops the stack it needs.
"""
