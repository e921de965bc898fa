# SPDX-License-Identifier: Apache-2.0
"""Stand-in: batches with more segments than `max_kda_segments` are refused where kernels have room for no more.

This is the one place where the iterators of all data pipelines, their config and their mesh come together.
"""

from typing import TYPE_CHECKING

from maxtext._release.input_pipeline import input_pipeline_interface as release
from maxtext.input_pipeline import _kda_segments_check

if TYPE_CHECKING:
  from maxtext._release.input_pipeline.input_pipeline_interface import *  # noqa: F403

globals().update({k: v for k, v in vars(release).items() if not k.startswith("__")})


def create_data_iterator(config, mesh):
  """Makes the iterators of training and evaluation, see the release; they refuse what `_kda_segments_check` refuses."""
  train, evaluation = release.create_data_iterator(config, mesh)
  _kda_segments_check.install(train, config, mesh, evaluation=False)
  _kda_segments_check.install(evaluation, config, mesh, evaluation=True)
  return train, evaluation
