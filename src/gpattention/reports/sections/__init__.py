"""The sections of a report; each shows one data set's models.

A new section is one file here: a function `content(comparison, name)` under `@section(...)`.
"""

import pkgutil
from importlib import import_module

from gpattention.reports.sections.registry import REGISTERED, Section

for _file in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")

SECTIONS = tuple(sorted(REGISTERED.values(), key=lambda section: (section.place, section.name)))

__all__ = ["SECTIONS", "Section"]
