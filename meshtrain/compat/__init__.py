"""All that meshtrain uses of other libraries beyond their public interfaces, one module per library or part of it.

Each function says why it is needed and with which versions it holds. `tests/compat` fails when a library changes.
"""
