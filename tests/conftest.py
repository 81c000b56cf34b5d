"""Session setup: TensorFlow gets its logical CPU devices before any test module is imported."""

from __future__ import annotations

import device_tools

# At import, not in a fixture: a test module may build tensors while pytest collects it, and then it is too late.
device_tools.configure_tensorflow()
