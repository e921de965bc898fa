# SPDX-License-Identifier: Apache-2.0
"""All tests run on the CPU; set before anything imports JAX, and inherited by the processes that tests start."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
