# SPDX-License-Identifier: Apache-2.0
"""What runs again in the backward pass under a rematerialization policy, counted in the traced program."""

import jax
import jax.numpy as jnp
import pytest

from maxtext.kernels.kda import chunk_kda

T, H, D = 64, 1, 8


def count_kernels(policy) -> dict[str, int]:
  """How many forward and backward kernels the gradient of a checkpointed call holds."""

  def loss(*arrays):
    o, _ = chunk_kda(*arrays, implementation="pallas")
    return jnp.sum(jax.ad_checkpoint.checkpoint_name(o, "context") ** 2)

  shapes = [jax.ShapeDtypeStruct((1, T, H, D), jnp.bfloat16)] * 4 + [jax.ShapeDtypeStruct((1, T, H), jnp.float32)]
  gradient = jax.grad(jax.checkpoint(loss, policy=policy), argnums=(0, 1, 2, 3, 4))
  program = str(jax.jit(gradient).trace(*shapes).jaxpr)
  return {name: program.count(f"name={name}\n") for name in ("kda_forward", "kda_backward")}


@pytest.mark.parametrize(
    ("policy", "forward"),
    [
        (jax.checkpoint_policies.everything_saveable, 1),
        (jax.checkpoint_policies.save_only_these_names("context"), 1),
        (jax.checkpoint_policies.nothing_saveable, 2),
    ],
    ids=["everything", "context", "nothing"],
)
def test_a_policy_that_saves_context_runs_the_forward_kernel_once(policy, forward):
  assert count_kernels(policy) == {"kda_forward": forward, "kda_backward": 1}
