"""The hypotheses, by subject. `colonnade.proof.claims` describes how to add one.

Importing this package imports all its modules in alphabetical order, which fills the table. That order decides between two
hypotheses that explain the same numbers equally well.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in sorted(module.name for module in iter_modules(__path__)):
    import_module(f"{__name__}.{_module}")
