"""How many bytes pip would fetch for a requirement: download_size.py CONSTRAINTS REQUIREMENT, run by the pip's Python.

Prints a number, or "unknown". Asks pip for its plan (a dry run) and each file's place for its length; fetches none.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def plan(constraints: str, requirement: str) -> list[str]:
    """The addresses of the files that pip would install."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "-qq", "--dry-run", "--report", str(report)]
        subprocess.run([*command, "-c", constraints, requirement], check=True, stdin=subprocess.DEVNULL)
        return [item["download_info"]["url"] for item in json.loads(report.read_text())["install"]]


def length(url: str) -> int:
    with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=20) as response:
        return int(response.headers["Content-Length"])


def main() -> None:
    try:
        urls = plan(sys.argv[1], sys.argv[2])
        with ThreadPoolExecutor(8) as pool:
            print(sum(pool.map(length, urls)))
    # An index with a password, one that gives no lengths, a plan that pip cannot make: the person decides.
    except (OSError, KeyError, TypeError, ValueError, subprocess.CalledProcessError):
        print("unknown")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
