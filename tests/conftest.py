"""Settings of every test: how many examples a property is tried on, and what the garbage collector looks through."""

from __future__ import annotations

from hypothesis import settings

# The same examples each time: what fails here fails again. The first profile stands unless --hypothesis-profile names one.
for name, max_examples in (("default", 100), ("quick", 10), ("all", 500)):
    settings.register_profile(name, max_examples=max_examples, derandomize=True, database=None, deadline=None)
if settings.get_current_profile_name() not in ("quick", "all"):
    settings.load_profile("default")


def pytest_collection_finish() -> None:
    """Freeze what was imported: some tests collect garbage many times."""
    from .support import frozen  # noqa: F401  (what it does when it is imported, and not before)
