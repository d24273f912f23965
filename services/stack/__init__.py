"""`dsec up`, `down` and `doctor`: a whole DSec on one machine, as real processes, supervised.

Not a service: it speaks no contract. It writes the configuration of the bus, starts NATS (a hub
and one leaf per node), Valkey and the five services, restarts what dies, and takes everything
away again.
"""
