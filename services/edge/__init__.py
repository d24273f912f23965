"""The edge: one per node, the sole owner of its sandboxes' state, from acceptance to death.

Read `__main__` (what is wired to what), `handlers` (the verbs), then `sandbox` (a sandbox is a
stack of acquired resources) and `journal` (what survives a `kill -9`).
"""
