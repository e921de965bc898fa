# SPDX-License-Identifier: Apache-2.0
"""What a computation is traced for."""

import jax


def platform() -> str:
  """That of the abstract mesh's device where one is set (ahead-of-time compilation), else JAX's default backend."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return jax.default_backend() if device is None else device.platform
