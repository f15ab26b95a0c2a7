"""Tools beside training: reports, plans, recipes from other projects' configs, `doctor` and pages.

Imports `dovetail`, which imports nothing of this package (docs/adr/028-two-packages.md).
"""
