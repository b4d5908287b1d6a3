"""A device with KV groups, and tiers below it, against a model that looks at every token and part of all of them."""

from __future__ import annotations

import pytest
from hypothesis import settings

from builders.tiered_machine import TieredMachine

pytestmark = pytest.mark.laws

TestTiered = TieredMachine.TestCase
TestTiered.settings = settings(stateful_step_count=40)
