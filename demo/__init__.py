"""The main job, end to end: eight software-engineering rollouts in real sandboxes (`make demo`)."""
