"""The fixture of the same room's unit tests."""

from tests.unit.engine.conftest import one_thread

__all__ = ["one_thread"]
