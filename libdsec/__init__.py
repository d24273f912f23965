"""libdsec: the client of DSec."""
