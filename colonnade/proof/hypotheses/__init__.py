"""The hypotheses, by subject. How to add one: `colonnade.proof.claims`.

Importing this package imports every module in it, in the order of their names, and so fills the table. That order decides
between two hypotheses that explain the same numbers equally well.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in sorted(each.name for each in iter_modules(__path__)):
    import_module(f"{__name__}.{_module}")
