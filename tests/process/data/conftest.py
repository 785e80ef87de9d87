"""The fixture of the same room's unit tests."""

from tests.unit.data.conftest import own_cache

__all__ = ["own_cache"]
