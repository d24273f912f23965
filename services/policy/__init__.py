"""The policy service: turns what a sandbox may reach into what the node's kernel enforces."""
