"""Base images made on the spot, as tar archives to be published as layers.

    busybox   a shell and its tools in one static program: 2 MB, for tests and a first sandbox
    debian    Debian 12 with Python, pip and pytest: what a pure-Python project's tests need

Not a service: `python -m services.images busybox` prints the archive's path. Archives are kept in
a cache directory under the fingerprint of their recipe, so a second call is a look-up. No registry
is involved: both come from this machine's Debian packages.
"""

from .cache import cached
from .recipe import RECIPES, Recipe

__all__ = ["RECIPES", "Recipe", "cached"]
