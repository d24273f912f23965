"""The snapshotter: takes a paused sandbox's memory back and hands it out again at resume.

    settings   what an operator chooses
    pause      the steps themselves, blocking: freeze -> reclaim; prefetch -> thaw
    handlers   the verbs, with their budgets, errors and numbers

Keeps nothing: the state is the cgroup's. Killed at any point it leaves a sandbox frozen or running,
and the edge can thaw it with one write. Any number of workers share a node.
"""
