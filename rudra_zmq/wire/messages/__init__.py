"""Every message of both planes: its fields and their limits. Knows no socket and no state."""
