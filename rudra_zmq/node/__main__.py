"""`python -m rudra_zmq.node`: started by psd alone, with its spec on stdin."""

from __future__ import annotations

import sys

from rudra_zmq.node.main import main

if __name__ == "__main__":
    sys.exit(main())
