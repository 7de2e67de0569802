"""How much Hypothesis may take for granted of the machine."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A busy machine makes single examples slow, which says nothing about the code.
settings.register_profile("any-load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-load")
