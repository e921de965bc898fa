# SPDX-License-Identifier: Apache-2.0
"""Build hook: bring the released MaxText into src/maxtext/_release before the wheel is put together.

The release comes out of the build environment (`maxtext===0.2.5` in [build-system].requires), so its source is not kept
in this repository. Its `dependencies` folder, on which its console scripts rest, becomes src/dependencies.
"""

from importlib.metadata import PackageNotFoundError, distribution
import os
from pathlib import Path
import shutil
import tempfile

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

RELEASE = "0.2.5"
HOW = f"let pip make the build environment (no --no-build-isolation), which installs maxtext==={RELEASE}"


class ReleaseHook(BuildHookInterface):

  def initialize(self, version, build_data):
    src = Path(self.root) / "src"
    targets = {"maxtext": src / "maxtext" / "_release", "dependencies": src / "dependencies"}
    stamp = targets["maxtext"] / "RELEASE"
    # The stamp is written before the rename that makes the folder visible, so where it stands the copy is complete.
    if stamp.is_file() and stamp.read_text().strip() == RELEASE and targets["dependencies"].is_dir():
      return
    with tempfile.TemporaryDirectory(prefix=".maxtext-release-", dir=src) as name:
      fresh = {top: Path(name) / top for top in targets}
      for file, top, inner in released_files():
        target = fresh[top] / inner
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
      (fresh["maxtext"] / stamp.name).write_text(RELEASE + "\n")
      for top in ("dependencies", "maxtext"):  # the stamped one last
        if targets[top].exists():
          os.rename(targets[top], Path(name) / f"old-{top}")
        os.rename(fresh[top], targets[top])


def released_files():
  """Yields (file, top-level folder, path below it) for all that the release installed, caches left out."""
  try:
    release = distribution("maxtext")
  except PackageNotFoundError:
    raise RuntimeError(f"The build environment has no maxtext; {HOW}.") from None
  files = [f for f in release.files or () if "__pycache__" not in f.parts]
  if release.version != RELEASE or any("_release" in f.parts for f in files):
    raise RuntimeError(f"The build environment has maxtext {release.version}, not the plain release {RELEASE}; {HOW}.")
  if not any(f.parts[0] == "maxtext" for f in files):
    raise RuntimeError(f"The maxtext {RELEASE} of the build environment lists no files of its package; {HOW}.")
  for f in files:
    if f.parts[0] in ("maxtext", "dependencies"):
      yield f.locate(), f.parts[0], Path(*f.parts[1:])
    elif f.parts[0].endswith(".dist-info") and f.name in ("LICENSE", "AUTHORS"):
      yield f.locate(), "maxtext", Path(f.name)
