"""The time that OpenMP threads poll before they sleep. torch's ops and the native kernels run on these threads.

By default GNU's runtime polls 300,000 times at the end of each parallel loop, which takes some milliseconds. On a core that is
shared with another process, a polling thread delays the thread for which it waits. The runtime reads GOMP_SPINCOUNT once, when
torch loads it, so this module sets GOMP_SPINCOUNT when `tilegrad` is imported. A value in the environment has precedence.
"""

from __future__ import annotations

import os
import platform
import sys

# Fewer polls make an idle machine slower, and more polls make a busy machine slower. 1000 was measured on x86
# (2026-11-15-training-cpu.md).
SPINS = "1000" if platform.machine() in ("x86_64", "AMD64") else "5000"


def _limit_polling() -> str:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        if name in os.environ:
            return f"{name}={os.environ[name]}, from the environment"
    if "torch" in sys.modules:
        return (
            "threads poll long at the end of a loop because torch was imported before tilegrad; on a busy machine "
            f"import tilegrad first or set GOMP_SPINCOUNT={SPINS}"
        )
    os.environ["GOMP_SPINCOUNT"] = SPINS
    return f"GOMP_SPINCOUNT={SPINS}, set before torch was loaded"


WAITING = _limit_polling()  # a sentence about this setting, for `tilegrad doctor`
