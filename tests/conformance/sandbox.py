"""What a sandbox must do, whatever its backend, as its owner sees it through the client.

A backend's test module inherits these classes and gives two fixtures: `sandbox`, one that may be
shared by all cases of a class, and `home`, a directory inside it that exists and is writable, new
for each case. Inside there are /bin/sh and the usual small tools; the user is the image's.
"""

from __future__ import annotations

from .command import CommandCases
from .file import FileCases
from .life import LifeCases
from .process import ProcessCases

__all__ = ["CommandCases", "FileCases", "LifeCases", "ProcessCases"]
