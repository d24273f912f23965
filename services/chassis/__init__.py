"""The one skeleton of a service: settings, signals, drain, consumers, telemetry, health.

Every service stands on it and on nothing of another service. It knows NATS and the contracts, and
neither sandboxes nor the host.
"""
