"""A small DSec to test the client against: the wire contracts answered for real, over either bus.

Nothing of the services is used. Commands are this machine's processes, files are below a temporary
directory; what a test wants to go wrong it says to the parts themselves.
"""
