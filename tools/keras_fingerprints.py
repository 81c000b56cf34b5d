"""Print the fingerprints of the installed Keras at lockstep's seams. Usage: python tools/keras_fingerprints.py

Run it with a new Keras, read what changed where a line says "new", check the seam, then add the hash to
``src/lockstep/engine/keras_fingerprints.py``.
"""

from __future__ import annotations

import keras

from lockstep.engine.keras_fingerprints import KNOWN
from lockstep.engine.keras_private import SEAMS, fingerprint


def main() -> None:
    print(f"keras {keras.__version__}")
    for seam in SEAMS:
        owner, attribute = seam.owner()
        found = fingerprint(getattr(owner, attribute))
        print(f"{'known' if found in KNOWN[seam.key] else 'new  '} {found} {seam.key}")


if __name__ == "__main__":
    main()
