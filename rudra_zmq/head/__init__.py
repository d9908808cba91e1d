"""The head's own parts: registry, placement, coordination, files of jobs. No socket, no process, no torch."""
