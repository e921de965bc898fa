# SPDX-License-Identifier: Apache-2.0
"""All tests run on the CPU; set before anything imports JAX, and inherited by the processes that tests start."""

import os

from hypothesis import settings

os.environ["JAX_PLATFORMS"] = "cpu"

# HYPOTHESIS_PROFILE=long looks longer for counterexamples. Tests with settings of their own keep them.
settings.register_profile("short", deadline=None, max_examples=60)
settings.register_profile("long", deadline=None, max_examples=3000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))
